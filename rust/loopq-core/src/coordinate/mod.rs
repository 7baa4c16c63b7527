//! Codes and scales found coordinate by coordinate, for the loss `tr(D S D^T)`, `D = W^ - W`, `S = H + diag(mu)`.
//!
//! | file | stage |
//! |---|---|
//! | `sweep` | static scales of least error, and a greedy sweep in the factor's order |
//! | `descent` | single codes are changed until none gains |
//! | `refit` | scales of least loss for the codes found |
//! | `tile` | the stages in turn, and again from the new scales until nothing gains |
//! | `coupled` | the same under a second metric, between outputs |
//!
//! Every stage after the first is taken, row by row, only where it lowers the loss, so the damped proxy falls from stage
//! to stage. The greedy sweep is the one of GPTQ, in another order: but for the ends of the grid, Babai's nearest plane in
//! the lattice problem that rounding under `S` is (J. Chen et al., *The Geometry of LLM Quantization*, 2025,
//! arXiv:2507.18553).

mod coupled;
mod descent;
mod refit;
mod sweep;
mod tile;

pub use coupled::{coupled, CoupledReport};

use rayon::prelude::*;

use crate::factor::{DampedFactor, DampedHessian};
use crate::grid::{Grid, Level, Quantized, Search};
use crate::lanes::{add_products, Lane, LANES};
use crate::simd::Isa;
use crate::weight::Weight;
use crate::{Error, Execution, Result};

use tile::Course;

/// How the error of a column counts in the search for the static scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cost {
    /// No search: the largest magnitude sets the scale.
    Largest,
    /// Every column alike.
    Even,
    /// By the diagonal of `S`: what an error costs that nothing makes up for.
    Diagonal,
    /// By `1 / [S^-1]_jj`: what it costs when all other columns do.
    Conditional,
}

impl Cost {
    /// The weighting with that name.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "largest" => Ok(Self::Largest),
            "even" => Ok(Self::Even),
            "diagonal" => Ok(Self::Diagonal),
            "conditional" => Ok(Self::Conditional),
            _ => Err(Error::setting(
                "scale_cost",
                format!("{name:?}"),
                "'largest', 'even', 'diagonal', 'conditional'",
            )),
        }
    }

    /// How a grid's scales are searched for.
    #[must_use]
    pub fn search(self) -> Search {
        if self == Self::Largest {
            Search::Max
        } else {
            Search::Mse
        }
    }
}

/// Settings of a solve.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// The grid; its `search` is that of `cost`.
    pub grid: Grid,
    /// How errors count in the scale search.
    pub cost: Cost,
    /// Times round of one coordinate descent; 0 leaves it out.
    pub sweeps: usize,
    /// Rounds of descent, refit and new sweep.
    pub rounds: usize,
    /// Whether scales are refitted.
    pub refit: bool,
}

/// The damped proxy after each stage, summed over rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// After the first sweep.
    pub swept: f64,
    /// After the first descent.
    pub descended: f64,
    /// After the first refit.
    pub refitted: f64,
    /// At the end.
    pub settled: f64,
    /// Code changes of all descents.
    pub moves: u64,
    /// Rounds of the row that took most.
    pub rounds: usize,
}

/// What is the same for every tile of a layer.
struct Problem<'a> {
    dim: usize,
    /// Damped Hessian, row-major, full.
    s: &'a [f64],
    factor: &'a DampedFactor<f64>,
    grid: Grid,
    settings: &'a Settings,
    /// How errors of the columns count in the scale search.
    weights: Vec<f64>,
    isa: Isa,
}

impl<'a> Problem<'a> {
    fn new(
        w: Weight<'_>,
        input: &DampedHessian<'a>,
        settings: &'a Settings,
        execution: &Execution<'_>,
    ) -> Result<Self> {
        settings.grid.check()?;
        let (s, factor) = (input.matrix()?, input.factor());
        let dim = factor.dim();
        w.check_width(dim)?;
        let weights = match settings.cost {
            Cost::Largest | Cost::Even => vec![1.0; dim],
            Cost::Diagonal => (0..dim).map(|j| s[j * dim + j]).collect(),
            Cost::Conditional => input.energies(execution)?.to_vec(),
        };
        let grid = Grid { search: settings.cost.search(), ..settings.grid };
        Ok(Self { dim, s, factor, grid, settings, weights, isa: Isa::best() })
    }

    fn group_of(&self, column: usize) -> usize {
        column / self.grid.group(self.dim)
    }

    fn s_row(&self, j: usize) -> &[f64] {
        &self.s[j * self.dim..(j + 1) * self.dim]
    }

    /// `by S` for every lane, where `by` has a number for each of the columns from `first` on.
    fn image(&self, first: usize, by: &[Lane]) -> Vec<Lane> {
        let mut out = vec![[0.0; LANES]; self.dim];
        let rows: Vec<&[f64]> = (first..first + by.len()).map(|j| self.s_row(j)).collect();
        add_products(self.isa, &mut out, &rows, by);
        out
    }
}

/// Codes of a tile and the values they stand for, by column; levels by group.
#[derive(Clone)]
struct Solution {
    codes: Vec<[u8; LANES]>,
    values: Vec<Lane>,
    levels: Vec<[Level; LANES]>,
}

impl Solution {
    /// Writes as many rows as `codes` (rows, dim) has room for, and their `scales` and `zeros` (rows, groups).
    fn store(&self, codes: &mut [u8], scales: &mut [f32], zeros: &mut [u8]) {
        let n_groups = self.levels.len();
        for (r, row) in codes.chunks_exact_mut(self.codes.len()).enumerate() {
            for (to, lane) in row.iter_mut().zip(&self.codes) {
                *to = lane[r];
            }
            for (g, level) in self.levels.iter().enumerate() {
                scales[r * n_groups + g] = level[r].scale;
                zeros[r * n_groups + g] = level[r].zero;
            }
        }
    }
}

/// Quantizes `W`.
pub fn coordinate(
    w: Weight<'_>,
    input: &DampedHessian<'_>,
    settings: &Settings,
    execution: &Execution<'_>,
) -> Result<(Quantized, Report)> {
    let problem = Problem::new(w, input, settings, execution)?;
    let (dim, n_groups) = (problem.dim, problem.grid.n_groups(problem.dim));
    let mut out = Quantized::zeroed(w.rows(), dim, &problem.grid)?;
    let tiles: Vec<Result<Course>> = execution.pool()?.install(|| {
        let levels =
            out.scales.par_chunks_mut(LANES * n_groups).zip(out.zeros.par_chunks_mut(LANES * n_groups));
        out.codes
            .par_chunks_mut(LANES * dim)
            .zip(levels)
            .enumerate()
            .map(|(tile, (codes, (scales, zeros)))| {
                let solved = problem.solve_tile(w, tile * LANES, execution)?;
                solved.solution.store(codes, scales, zeros);
                Ok(solved.course)
            })
            .collect()
    });
    Ok((out, report(tiles, w.rows())?))
}

/// Sums over the rows of all tiles, in their order.
fn report(tiles: Vec<Result<Course>>, rows: usize) -> Result<Report> {
    let (mut sums, mut moves, mut rounds) = ([0.0; 4], 0, 0);
    for (tile, course) in tiles.into_iter().enumerate() {
        let course = course?;
        for r in 0..LANES.min(rows - tile * LANES) {
            for (sum, stage) in sums.iter_mut().zip(&course.stages) {
                *sum += stage[r];
            }
        }
        moves += course.moves;
        rounds = rounds.max(course.rounds);
    }
    let [swept, descended, refitted, settled] = sums;
    Ok(Report { swept, descended, refitted, settled, moves, rounds })
}
