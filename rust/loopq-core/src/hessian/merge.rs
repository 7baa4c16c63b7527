//! Adding one accumulator to another.

use crate::hessian::accumulate::Accumulator;
use crate::hessian::matrix::ExactMatrix;
use crate::hessian::SUM_LIMIT;
use crate::{Cancel, Error, Result};

impl Accumulator {
    /// Adds another finished accumulator: any order, any grouping, the same bits. Where it was stopped half-way, this
    /// one is not whole any more, and says so.
    pub fn merge(&mut self, other: &Self, cancel: &Cancel) -> Result<()> {
        self.check_finished()?;
        other.check_finished()?;
        let (a, b) = (&self.settings, &other.settings);
        let differ = |what, left: String, right: String| Err(Error::MergeMismatch { what, left, right });
        if a.dim != b.dim {
            return differ("dims", a.dim.to_string(), b.dim.to_string());
        }
        if a.steps != b.steps {
            return differ("steps", format!("{:?}", a.steps), format!("{:?}", b.steps));
        }
        if a.per_step != b.per_step {
            return differ("per_step", a.per_step.to_string(), b.per_step.to_string());
        }
        if self.bound() + other.bound() > SUM_LIMIT {
            self.tighten();
            let theirs: f64 = other.matrices.iter().map(ExactMatrix::top).sum();
            if self.bound() + theirs > SUM_LIMIT {
                let (step, rows) = (self.settings.steps[0], self.waiting[0].n_rows);
                return Err(Error::SumTooLarge { step, rows, limit: SUM_LIMIT });
            }
        }
        self.broken = true;
        for (mine, theirs) in self.matrices.iter_mut().zip(&other.matrices) {
            cancel.check()?;
            mine.merge(theirs);
        }
        self.broken = false;
        for (mine, theirs) in self.waiting.iter_mut().zip(&other.waiting) {
            mine.n_rows = mine.n_rows.saturating_add(theirs.n_rows);
            mine.bound += theirs.bound + theirs.bound_waiting;
        }
        Ok(())
    }
}
