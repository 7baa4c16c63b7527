//! The exact state as plain integers, for files.

use std::borrow::Cow;

use crate::hessian::accumulate::{Accumulator, Settings};
use crate::hessian::matrix::{upper_index, ExactMatrix};
use crate::memory::zeros;
use crate::{dims, Cancel, Error, Result};

/// Version of the summation and of the state's layout (`docs/formats/hessian.md`).
pub const SPEC_VERSION: i64 = 1;

/// One exact matrix: row-major packed upper triangles of both limbs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatrixState<'a> {
    /// Multiples of `2^2`.
    pub hi: Cow<'a, [i64]>,
    /// Multiples of `2^-60`, `0 <= lo < 2^62`.
    pub lo: Cow<'a, [i64]>,
}

/// Everything that an accumulator is, once finished.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State<'a> {
    /// [`SPEC_VERSION`] of the writer.
    pub spec_version: i64,
    /// Columns.
    pub dim: usize,
    /// Steps, ascending.
    pub steps: Vec<usize>,
    /// One matrix per step, or one for their sum.
    pub per_step: bool,
    /// Rows per step.
    pub n_rows: Vec<u64>,
    /// The matrices, in the order of the steps.
    pub matrices: Vec<MatrixState<'a>>,
}

impl Accumulator {
    /// The exact state.
    pub fn state(&self, cancel: &Cancel) -> Result<State<'static>> {
        self.check_finished()?;
        let Settings { dim, steps, per_step, .. } = self.settings.clone();
        let n = dims::n_upper(dim)?;
        let matrices = self.matrices.iter().map(|m| {
            cancel.check()?;
            let limbs = || zeros("the state of a Hessian", n);
            let (mut hi, mut lo) = (limbs()?, limbs()?);
            m.for_each(|i, j, h, l| {
                let at = upper_index(dim, i, j);
                (hi[at], lo[at]) = (h, l);
            });
            Ok(MatrixState { hi: hi.into(), lo: lo.into() })
        });
        let matrices = matrices.collect::<Result<_>>()?;
        let n_rows = steps.iter().map(|&s| self.n_rows(s)).collect::<Result<_>>()?;
        Ok(State { spec_version: SPEC_VERSION, dim, n_rows, per_step, matrices, steps })
    }

    /// A finished accumulator with that state.
    pub fn from_state(state: &State<'_>, threads: usize, cancel: &Cancel) -> Result<Self> {
        if state.spec_version != SPEC_VERSION {
            let reason = format!("spec version {} where this loopq reads {SPEC_VERSION}", state.spec_version);
            return Err(Error::BadState(reason));
        }
        let expected = if state.per_step { state.steps.len() } else { 1 };
        if state.matrices.len() != expected || state.n_rows.len() != state.steps.len() {
            return Err(Error::BadState(format!(
                "{} steps need {expected} matrices and {} row counts; found {} and {}",
                state.steps.len(),
                state.steps.len(),
                state.matrices.len(),
                state.n_rows.len()
            )));
        }
        let settings = Settings {
            dim: state.dim,
            steps: state.steps.clone(),
            per_step: state.per_step,
            threads,
            isa: crate::simd::Isa::best(),
        };
        settings.check().map_err(|e| Error::BadState(e.to_string()))?;
        // Before memory is taken for what the file says its width is.
        let n = dims::n_upper(state.dim)?;
        if let Some(bad) = state.matrices.iter().find(|m| m.hi.len() != n || m.lo.len() != n) {
            let given = format!("{} and {} given", bad.hi.len(), bad.lo.len());
            return Err(Error::BadState(format!("{n} entries needed, {given}")));
        }
        let mut matrices = Vec::with_capacity(expected);
        for saved in &state.matrices {
            cancel.check()?;
            let mut matrix = ExactMatrix::zeros(state.dim)?;
            matrix.load(&saved.hi, &saved.lo)?;
            matrices.push(matrix);
        }
        Ok(Self::restore(settings, matrices, &state.n_rows))
    }
}
