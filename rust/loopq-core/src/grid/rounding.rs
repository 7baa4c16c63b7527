//! From values to codes and back: what solvers ask a grid in their inner loops.

use crate::grid::steps::{Even, Steps};
use crate::grid::table::Nearest;
use crate::grid::{Grid, Values};

/// How the codes of a grid stand for steps.
pub(crate) enum Rounding {
    Even(Even),
    Table(Box<Nearest>),
}

/// Runs an expression with the steps of a `&Rounding`, compiled for each kind.
macro_rules! by_steps {
    ($rounding:expr, |$steps:ident| $run:expr) => {
        match $rounding {
            $crate::grid::Rounding::Even(even) => {
                let $steps = *even;
                $run
            }
            $crate::grid::Rounding::Table(nearest) => {
                let $steps = &**nearest;
                $run
            }
        }
    };
}
pub(crate) use by_steps;

impl Rounding {
    /// The steps of a biased code.
    pub(crate) fn step(&self, code: u8, zero: f32) -> f32 {
        by_steps!(self, |steps| steps.step(f32::from(code), zero))
    }

    /// The biased code of steps that a code has.
    pub(crate) fn code(&self, steps: f64, zero: f64) -> u8 {
        by_steps!(self, |known| known.code(steps, zero)) as u8
    }
}

impl Grid {
    /// How its codes stand for steps; of a plain grid.
    pub(crate) fn rounding(&self) -> Rounding {
        match &self.values {
            Values::Table(table) => Rounding::Table(Box::new(Nearest::new(table))),
            Values::Even | Values::Trellis(_) => Rounding::Even(Even { top: f64::from(self.top()) }),
        }
    }
}
