//! The interface between solver loops and the values of codes, and its version for evenly spaced values.

/// How codes stand for *steps*, values in scales. Loops are compiled for each kind.
pub(crate) trait Steps: Copy {
    /// The biased code nearest to some steps.
    fn code(self, steps: f64, zero: f64) -> f64;
    /// The steps of a biased code.
    fn step(self, code: f32, zero: f32) -> f32;
    /// The nearest biased code or a neighbour of it, the next one on the other side, and whether there is such a code.
    fn two(self, steps: f32, zero: f32) -> (f32, f32, bool);
    /// The steps nearest to others that codes have.
    fn nearest<const N: usize>(self, steps: [f64; N], zero: [f64; N]) -> [f64; N];
}

/// Steps of evenly spaced values: codes less the zero point.
#[derive(Clone, Copy)]
pub(crate) struct Even {
    /// Largest biased code.
    pub(crate) top: f64,
}

impl Steps for Even {
    #[inline(always)]
    fn code(self, steps: f64, zero: f64) -> f64 {
        (steps.round_ties_even() + zero).max(0.0).min(self.top)
    }

    #[inline(always)]
    fn step(self, code: f32, zero: f32) -> f32 {
        code - zero
    }

    #[inline(always)]
    fn two(self, steps: f32, zero: f32) -> (f32, f32, bool) {
        let (x, top) = (steps + zero, self.top as f32);
        let whole = x.round_ties_even();
        let near = if whole > 0.0 { whole } else { 0.0 };
        let near = if near < top { near } else { top };
        let other = if x > near { near + 1.0 } else { near - 1.0 };
        (near, other, other >= 0.0 && other <= top)
    }

    #[inline(always)]
    fn nearest<const N: usize>(self, mut steps: [f64; N], zero: [f64; N]) -> [f64; N] {
        for step in &mut steps {
            *step = step.round_ties_even();
        }
        for (step, zero) in steps.iter_mut().zip(zero) {
            *step = if *step > -zero { *step } else { -zero };
        }
        for (step, zero) in steps.iter_mut().zip(zero) {
            let high = self.top - zero;
            *step = if *step < high { *step } else { high };
        }
        steps
    }
}
