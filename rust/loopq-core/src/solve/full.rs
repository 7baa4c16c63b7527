//! The full solver: static scales of least error, a good order, one greedy sweep, coordinate descent, closed-form
//! refit of the scales, and again from the new scales until nothing gains.
//!
//! Every stage after the first is taken, row by row, only where it lowers `(W^ - W) S (W^ - W)^T`, so the damped proxy
//! falls from stage to stage. `S = H + diag(mu)` with `mu` chosen by the caller.

use rayon::prelude::*;

use crate::error::name_of;
use crate::factor::{Factor, Symmetric};
use crate::grid::{Grid, Level, Quantized, Search};
use crate::pool::pool;
use crate::solve::descent::{add_product, Choice, Field, Lane, LANES};
use crate::solve::fit::{fit, Cost};
use crate::solve::order::{by_conditional_energy, by_diagonal, inverse, Order};
use crate::solve::{check_weight, located};
use crate::{Error, Result, Watch};

/// Relative gain of a round below which a row is done.
const SETTLED: f64 = 1e-6;

/// What a Hessian needs done once, for all layers that see the same input.
#[derive(Debug)]
pub struct Prepared {
    dim: usize,
    s: Vec<f64>,
    order: Vec<usize>,
    /// `A` of the factor, row-major, in the order of the sweep.
    a: Vec<f64>,
    pivots: Vec<f64>,
    /// `1 / [S^-1]_jj`.
    conditional: Vec<f64>,
}

impl Prepared {
    /// Damps, orders and factors `H`; `mu` is added to its diagonal.
    pub fn new(
        h: Symmetric<'_>,
        mu: &[f64],
        dim: usize,
        order: Order,
        threads: usize,
        watch: &Watch,
    ) -> Result<Self> {
        if dim == 0 {
            return Err(Error::shape("H", "1 or more columns", 0));
        }
        h.check(dim)?;
        if mu.len() != dim {
            return Err(Error::shape("mu", dim, mu.len()));
        }
        if let Some(bad) = mu.iter().find(|v| !v.is_finite() || **v < 0.0) {
            return Err(Error::setting("mu", bad, "finite numbers of 0 or more"));
        }
        let mut s = vec![0.0; dim * dim];
        for i in 0..dim {
            s[i * dim + i] = h.at(i * dim + i) + mu[i];
            for j in i + 1..dim {
                let value = h.at(i * dim + j);
                s[i * dim + j] = value;
                s[j * dim + i] = value;
            }
        }
        let natural: Vec<usize> = (0..dim).collect();
        let plain = factored(&s, dim, &natural, threads, watch)?;
        let inverse = inverse(&plain.a.dense(), plain.pivots(), threads, watch)?;
        let conditional = (0..dim).map(|j| 1.0 / inverse[j * dim + j]).collect();
        let order = match order {
            Order::Natural => natural.clone(),
            Order::Diagonal => by_diagonal(&s, dim),
            Order::Conditional => by_conditional_energy(&inverse, dim, threads, watch)?,
        };
        let factor = if order == natural { plain } else { factored(&s, dim, &order, threads, watch)? };
        Ok(Self { dim, s, order, a: factor.a.dense(), pivots: factor.pivots().to_vec(), conditional })
    }

    /// Columns.
    #[must_use]
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// The column at each place of the sweep.
    #[must_use]
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// What a unit error in each column costs when all others make up for it.
    #[must_use]
    pub fn conditional(&self) -> &[f64] {
        &self.conditional
    }

    /// The target of asymmetric calibration, `W (I + alpha C S^-1)`: what, multiplied with the inputs that the layer
    /// will really get, comes nearest to its output on the inputs that it should have got. `C = sum (X - X^)^T X^`.
    pub fn shift(
        &self,
        w: &[f32],
        rows: usize,
        cross: &[f64],
        alpha: f64,
        threads: usize,
        watch: &Watch,
    ) -> Result<Vec<f32>> {
        let dim = self.dim;
        check_weight("W", w, rows, dim)?;
        crate::dims::check_matrix("C", cross, dim, dim)?;
        if let Some(at) = cross.iter().position(|v| !v.is_finite()) {
            return Err(Error::NonFiniteMatrix {
                what: "C",
                row: at / dim,
                column: at % dim,
                value: name_of(cross[at]),
            });
        }
        if !alpha.is_finite() {
            return Err(Error::setting("alpha", alpha, "a finite number"));
        }
        let mut out = vec![0.0; rows * dim];
        pool(threads)?.install(|| {
            out.par_chunks_mut(dim * LANES).enumerate().try_for_each(|(tile, out)| {
                watch.check()?;
                let first = tile * LANES;
                let lanes = lanes_of(w, rows, dim, first);
                let mut shift = vec![[0.0; LANES]; dim];
                for (j, lane) in lanes.iter().enumerate() {
                    add_product(&mut shift, &cross[j * dim..(j + 1) * dim], lane);
                }
                let shift = self.divide(&shift);
                for (r, row) in out.chunks_exact_mut(dim).enumerate() {
                    for (j, to) in row.iter_mut().enumerate() {
                        *to = (lanes[j][r] + alpha * shift[j][r]) as f32;
                    }
                }
                Ok(())
            })
        })?;
        Ok(out)
    }

    /// `b S^-1` for every lane.
    fn divide(&self, b: &[Lane]) -> Vec<Lane> {
        let (dim, a) = (self.dim, &self.a);
        let mut x: Vec<Lane> = self.order.iter().map(|&j| b[j]).collect();
        for i in (0..dim).rev() {
            let mut sum = [0.0; LANES];
            for (f, later) in a[i * dim + i + 1..(i + 1) * dim].iter().zip(&x[i + 1..]) {
                for r in 0..LANES {
                    sum[r] += f * later[r];
                }
            }
            for r in 0..LANES {
                x[i][r] -= sum[r];
            }
        }
        for (lane, pivot) in x.iter_mut().zip(&self.pivots) {
            for value in lane {
                *value /= pivot;
            }
        }
        for i in 0..dim {
            let by = x[i].map(|v| -v);
            add_product(&mut x[i + 1..], &a[i * dim + i + 1..(i + 1) * dim], &by);
        }
        let mut out = vec![[0.0; LANES]; dim];
        for (lane, &j) in x.iter().zip(&self.order) {
            out[j] = *lane;
        }
        out
    }

    /// `S`, row-major, full.
    pub(crate) fn s(&self) -> &[f64] {
        &self.s
    }

    /// `A` of the factor, row-major, in the order of the sweep.
    pub(crate) fn a(&self) -> &[f64] {
        &self.a
    }

    pub(crate) fn field(&self, settings: &FullSettings) -> Field<'_> {
        Field {
            dim: self.dim,
            s: &self.s,
            order: &self.order,
            a: &self.a,
            grid: Grid {
                search: if settings.cost == Cost::Largest { Search::Max } else { Search::Mse },
                ..settings.grid
            },
            signed: settings.signed,
        }
    }

    pub(crate) fn cost(&self, cost: Cost) -> Vec<f64> {
        match cost {
            Cost::Largest | Cost::Even => vec![1.0; self.dim],
            Cost::Diagonal => (0..self.dim).map(|j| self.s[j * self.dim + j]).collect(),
            Cost::Conditional => self.conditional.clone(),
        }
    }
}

/// Factor of `S` with its columns in the given order.
fn factored(s: &[f64], dim: usize, order: &[usize], threads: usize, watch: &Watch) -> Result<Factor<f64>> {
    let mut turned = vec![0.0; dim * dim];
    for (i, &from) in order.iter().enumerate() {
        for (j, &to) in order.iter().enumerate().skip(i) {
            turned[i * dim + j] = s[from * dim + to];
        }
    }
    Factor::new(Symmetric::F64(&turned), dim, 0.0, false, threads, watch).map_err(|e| match e {
        Error::NotPositive { column, dim, value, damping, precision } => {
            Error::NotPositive { column: order[column], dim, value, damping, precision }
        }
        other => other,
    })
}

/// Settings of a solve.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FullSettings {
    /// The grid; its `search` is set from `cost`.
    pub grid: Grid,
    /// Whether a scale may be negative.
    pub signed: bool,
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
pub struct FullReport {
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

pub(crate) struct Solved {
    pub(crate) choice: Choice,
    stages: [Lane; 4],
    moves: u64,
    rounds: usize,
}

/// Quantizes `W` (rows, dim).
pub fn full(
    w: &[f32],
    rows: usize,
    prepared: &Prepared,
    settings: &FullSettings,
    threads: usize,
    watch: &Watch,
) -> Result<(Quantized, FullReport)> {
    settings.grid.check()?;
    check_weight("W", w, rows, prepared.dim)?;
    let cost = prepared.cost(settings.cost);
    let field = prepared.field(settings);
    let n_tiles = rows.div_ceil(LANES);
    watch.plan(n_tiles as u64);
    let tiles: Vec<Result<Solved>> = pool(threads)?.install(|| {
        (0..n_tiles)
            .into_par_iter()
            .map(|tile| {
                watch.check()?;
                let solved = solve_tile(&field, settings, w, rows, tile * LANES, &cost, watch)?;
                watch.advance(1)?;
                Ok(solved)
            })
            .collect()
    });
    collect(tiles, &field, rows)
}

pub(crate) fn solve_tile(
    field: &Field<'_>,
    settings: &FullSettings,
    w: &[f32],
    rows: usize,
    first: usize,
    cost: &[f64],
    watch: &Watch,
) -> Result<Solved> {
    let lanes = lanes_of(w, rows, field.dim, first);
    let levels = fit_tile(field, &lanes, first, cost)?;
    let mut choice = field.sweep(&lanes, levels);
    let mut loss = field.gradient(&lanes, &choice.values).1;
    let mut stages = [loss; 4];
    let mut done = [false; LANES];
    let (mut moves, mut rounds) = (0, 0);
    while rounds < settings.rounds && done.contains(&false) {
        watch.check()?;
        let before = loss;
        let frozen = done;
        let mut next = choice.clone();
        moves += field.descend(&lanes, &mut next, settings.sweeps);
        take(field, &lanes, &mut choice, &mut loss, next, frozen);
        if rounds == 0 {
            stages[1] = loss;
        }
        if settings.refit {
            let mut next = choice.clone();
            next.levels = field.refit(&lanes, &choice);
            next.values = field.values(&next.codes, &next.levels);
            take(field, &lanes, &mut choice, &mut loss, next, frozen);
            if rounds == 0 {
                stages[2] = loss;
            }
            // New scales can make a better start than the place where the old codes are stuck.
            let mut next = field.sweep(&lanes, choice.levels.clone());
            moves += field.descend(&lanes, &mut next, settings.sweeps);
            take(field, &lanes, &mut choice, &mut loss, next, frozen);
        }
        if rounds == 0 && !settings.refit {
            stages[2] = loss;
        }
        for r in 0..LANES {
            // Written so that a loss of zero, or of less by rounding error, is done.
            done[r] |= !(loss[r] < before[r] * (1.0 - SETTLED));
        }
        rounds += 1;
    }
    stages[3] = loss;
    Ok(Solved { choice, stages, moves, rounds })
}

/// Rows from `first` on, side by side. Lanes without a row hold zeros, which every grid meets exactly.
fn lanes_of(w: &[f32], rows: usize, dim: usize, first: usize) -> Vec<Lane> {
    let live = LANES.min(rows - first);
    (0..dim)
        .map(|j| std::array::from_fn(|r| if r < live { f64::from(w[(first + r) * dim + j]) } else { 0.0 }))
        .collect()
}

fn fit_tile(field: &Field<'_>, lanes: &[Lane], first: usize, cost: &[f64]) -> Result<Vec<[Level; LANES]>> {
    let (dim, group) = (field.dim, field.grid.group(field.dim));
    let mut levels = Vec::with_capacity(field.grid.n_groups(dim));
    for g in 0..field.grid.n_groups(dim) {
        let range = g * group..dim.min((g + 1) * group);
        let mut level = [Level { scale: 1.0, zero: 0 }; LANES];
        for (r, to) in level.iter_mut().enumerate() {
            let values: Vec<f64> = lanes[range.clone()].iter().map(|lane| lane[r]).collect();
            *to = fit(&field.grid, field.signed, &values, &cost[range.clone()])
                .map_err(|e| located(e, first + r, g))?;
        }
        levels.push(level);
    }
    Ok(levels)
}

/// Takes a row's new choice over where it is better and the row is not done.
fn take(
    field: &Field<'_>,
    w: &[Lane],
    choice: &mut Choice,
    loss: &mut Lane,
    next: Choice,
    done: [bool; LANES],
) {
    let (_, new) = field.gradient(w, &next.values);
    for r in 0..LANES {
        if done[r] || !(new[r] < loss[r]) {
            continue;
        }
        loss[r] = new[r];
        for j in 0..field.dim {
            choice.codes[j][r] = next.codes[j][r];
            choice.values[j][r] = next.values[j][r];
        }
        for (to, from) in choice.levels.iter_mut().zip(&next.levels) {
            to[r] = from[r];
        }
    }
}

pub(crate) fn collect(
    tiles: Vec<Result<Solved>>,
    field: &Field<'_>,
    rows: usize,
) -> Result<(Quantized, FullReport)> {
    let (dim, n_groups) = (field.dim, field.grid.n_groups(field.dim));
    let mut out = Quantized {
        codes: vec![0; rows * dim],
        scales: vec![0.0; rows * n_groups],
        zeros: vec![0; rows * n_groups],
    };
    let (mut sums, mut moves, mut rounds) = ([0.0; 4], 0, 0);
    for (tile, solved) in tiles.into_iter().enumerate() {
        let solved = solved?;
        for r in 0..LANES.min(rows - tile * LANES) {
            let row = tile * LANES + r;
            for j in 0..dim {
                out.codes[row * dim + j] = solved.choice.codes[j][r];
            }
            for g in 0..n_groups {
                out.scales[row * n_groups + g] = solved.choice.levels[g][r].scale;
                out.zeros[row * n_groups + g] = solved.choice.levels[g][r].zero;
            }
            for (sum, stage) in sums.iter_mut().zip(&solved.stages) {
                *sum += stage[r];
            }
        }
        moves += solved.moves;
        rounds = rounds.max(solved.rounds);
    }
    let [swept, descended, refitted, settled] = sums;
    let report = FullReport { swept, descended, refitted, settled, moves, rounds };
    Ok((out, report))
}
