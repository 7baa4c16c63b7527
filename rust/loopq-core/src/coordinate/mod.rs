//! Codes and scales found coordinate by coordinate, for the loss `tr(D S D^T)`, `D = W^ - W`, `S = H + diag(mu)`.
//!
//! | file | what |
//! |---|---|
//! | `tile` | eight rows: where they stand, and the gradient of their loss |
//! | `descent` | single codes and single scales are changed until none gains |
//! | `settle` | GPTQ with static scales and several paths open, descents, and again from the scales found |
//! | `coupled` | the same under a second metric, between outputs |
//!
//! The loss falls with every change. A new start is accepted row by row, only where it ends lower. Rounding under `S`
//! is a lattice problem, and GPTQ's sweep is Babai's nearest plane in it, except at the ends of the grid (J. Chen et
//! al., *The Geometry of LLM Quantization*, 2025, arXiv:2507.18553). A beam of paths is the list decoder of that
//! problem.

mod coupled;
mod descent;
mod settle;
mod tile;

pub use coupled::{coupled, CoupledReport, TOGETHER};
pub use settle::{SETTLED, TURNS};

pub use crate::lanes::LANES;

use crate::factor::{DampedFactor, DampedHessian, Square};
use crate::grid::{Grid, Quantized, Rounding};
use crate::simd::Isa;
use crate::weight::Weight;
use crate::{Execution, Result};

/// Name of the working memory in errors.
const SCRATCH: &str = "rows that are solved together";

/// Settings of a solve.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// The grid, with the search for the static scales.
    pub grid: Grid,
    /// Paths of codes that GPTQ keeps open.
    pub beam: usize,
    /// Times round of one coordinate descent; 0 leaves it out.
    pub sweeps: usize,
    /// Starts: GPTQ, and GPTQ again with the scales found so far.
    pub rounds: usize,
    /// Whether scales are descended on too.
    pub refit: bool,
}

/// The damped proxy, summed over rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// After GPTQ.
    pub swept: f64,
    /// At the end.
    pub settled: f64,
    /// Code changes of all descents.
    pub moves: u64,
    /// Starts of the row that took most.
    pub rounds: usize,
}

/// Data shared by all tiles of a layer.
struct Problem<'a> {
    dim: usize,
    /// Damped Hessian.
    s: Square<'a>,
    factor: &'a DampedFactor<f64>,
    grid: Grid,
    rounding: Rounding,
    settings: &'a Settings,
    isa: Isa,
}

impl<'a> Problem<'a> {
    fn new(w: Weight<'_>, input: &DampedHessian<'a>, settings: &'a Settings) -> Result<Self> {
        settings.grid.check_plain()?;
        let (s, factor) = (input.matrix()?, input.factor());
        let dim = factor.dim();
        w.check_width(dim)?;
        let (grid, rounding) = (settings.grid, settings.grid.rounding());
        Ok(Self { dim, s, factor, grid, rounding, settings, isa: Isa::best() })
    }

    fn group_of(&self, column: usize) -> usize {
        column / self.grid.group(self.dim)
    }
}

/// Quantizes `W`.
pub fn coordinate(
    w: Weight<'_>,
    input: &DampedHessian<'_>,
    settings: &Settings,
    execution: &Execution<'_>,
) -> Result<(Quantized, Report)> {
    let (out, courses) = Problem::new(w, input, settings)?.solve(w, execution)?;
    let report = Report {
        swept: courses.iter().flat_map(|c| &c.swept).sum(),
        settled: courses.iter().flat_map(|c| &c.settled).sum(),
        moves: courses.iter().map(|c| c.moves).sum(),
        rounds: courses.iter().map(|c| c.rounds).max().unwrap_or(0),
    };
    Ok((out, report))
}
