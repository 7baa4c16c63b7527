//! Reading a finished accumulator: matrices, diagonals, traces.

use crate::hessian::accumulate::Accumulator;
use crate::hessian::limbs;
use crate::hessian::matrix::ExactMatrix;
use crate::memory::zeros;
use crate::{dims, Cancel, Error, Result};

impl Accumulator {
    /// Which matrices make up the sum over `steps`, ascending.
    fn chosen(&self, steps: Option<&[usize]>) -> Result<Vec<usize>> {
        self.check_finished()?;
        let Some(steps) = steps else {
            return Ok((0..self.matrices.len()).collect());
        };
        let mut found = steps.iter().map(|&s| self.index_of(s)).collect::<Result<Vec<_>>>()?;
        found.sort_unstable();
        if found.is_empty() || found.windows(2).any(|w| w[0] == w[1]) {
            return Err(Error::setting("steps", format!("{steps:?}"), "one or more steps, each once"));
        }
        if self.settings.per_step {
            return Ok(found);
        }
        if found.len() == self.settings.steps.len() {
            return Ok(vec![0]);
        }
        Err(Error::OnlySummed { got: steps.to_vec(), steps: self.settings.steps.clone() })
    }

    /// The full symmetric sum over steps, row-major: the exact sum rounded once to double precision.
    pub fn matrix(&self, steps: Option<&[usize]>, cancel: &Cancel) -> Result<Vec<f64>> {
        let chosen = self.chosen(steps)?;
        let dim = self.settings.dim;
        let mut out = zeros("a Hessian", dims::product("a Hessian", dim, dim)?)?;
        if let [only] = chosen[..] {
            self.matrices[only]
                .for_each(|i, j, hi, lo| out[i * dim + j] = limbs::to_f64(limbs::integer(hi, lo)));
        } else {
            let mut sum = ExactMatrix::zeros(dim)?;
            for &m in &chosen {
                cancel.check()?;
                sum.merge(&self.matrices[m]);
            }
            sum.for_each(|i, j, hi, lo| out[i * dim + j] = limbs::to_f64(limbs::integer(hi, lo)));
        }
        mirror(&mut out, dim);
        Ok(out)
    }

    /// `sum_t weights[t] * H_t` in double precision, each `H_t` rounded once, folded in ascending order of steps.
    pub fn weighted(&self, steps: Option<&[usize]>, weights: &[f64], cancel: &Cancel) -> Result<Vec<f64>> {
        let chosen = self.chosen(steps)?;
        if !self.settings.per_step && self.settings.steps.len() > 1 {
            return Err(Error::OnlySummed {
                got: steps.map_or_else(|| self.settings.steps.clone(), <[usize]>::to_vec),
                steps: self.settings.steps.clone(),
            });
        }
        let order = steps.map_or_else(|| self.settings.steps.clone(), <[usize]>::to_vec);
        if weights.len() != order.len() {
            return Err(Error::shape("weights", format!("{} (one per step)", order.len()), weights.len()));
        }
        if let Some(bad) = weights.iter().find(|w| !w.is_finite() || **w < 0.0) {
            return Err(Error::setting("weights", bad, "finite numbers of 0 or more"));
        }
        let dim = self.settings.dim;
        let mut out = zeros("a Hessian", dims::product("a Hessian", dim, dim)?)?;
        for m in chosen {
            cancel.check()?;
            let weight = order.iter().position(|&s| s == self.settings.steps[m]).map_or(0.0, |p| weights[p]);
            self.matrices[m].for_each(|i, j, hi, lo| {
                let entry = &mut out[i * dim + j];
                *entry += weight * limbs::to_f64(limbs::integer(hi, lo));
            });
        }
        mirror(&mut out, dim);
        Ok(out)
    }

    /// The diagonal of the sum over steps.
    pub fn diagonal(&self, steps: Option<&[usize]>) -> Result<Vec<f64>> {
        let mut out = zeros("a diagonal", self.settings.dim)?;
        for m in self.chosen(steps)? {
            for (sum, entry) in out.iter_mut().zip(self.matrices[m].diagonal()?) {
                *sum += entry;
            }
        }
        Ok(out)
    }

    /// The trace of one step's Hessian, or of the sum over all steps.
    pub fn trace(&self, step: Option<usize>) -> Result<f64> {
        Ok(self.diagonal(step.as_ref().map(std::slice::from_ref))?.iter().sum())
    }
}

/// Copies the upper triangle onto the lower, block by block: columns of a whole matrix would ask for a page each entry.
fn mirror(matrix: &mut [f64], dim: usize) {
    const BLOCK: usize = 32;
    for top in (0..dim).step_by(BLOCK) {
        for left in (0..=top).step_by(BLOCK) {
            for i in top..dim.min(top + BLOCK) {
                for j in left..i.min(left + BLOCK) {
                    matrix[i * dim + j] = matrix[j * dim + i];
                }
            }
        }
    }
}
