//! The solver under a metric on both sides: `tr(A D S D^T)`, `A` between outputs, `S` between inputs.
//!
//! With `A = U diag(p) U^T`, `U` unit upper triangular, the loss is `sum_i p_i || D_i + sum_{k<i} U_ki D_k ||_S^2`.
//! Rows are solved tile by tile. The target of each row compensates the errors of the rows before it, as a sweep does
//! for columns. Then the descents continue from there, tile by tile with all others fixed. A changed row is accepted
//! where the whole loss falls. `Z = D S` is kept: the gradient of row `i` is `(A Z)_i`, so only changed columns need
//! another product with `S`.
//!
//! Rows of different blocks are not coupled. A thread takes a tile of each of its blocks at a time, so that one reading
//! of `S` and of its factor serves them all.

use std::ops::Range;

use rayon::prelude::*;

use crate::coordinate::tile::Tile;
use crate::coordinate::{Problem, Settings, SCRATCH};
use crate::factor::{DampedHessian, Square};
use crate::grid::Quantized;
use crate::lanes::{Lane, LANES};
use crate::memory::{collected, copied, extend, zeros};
use crate::simd::add_rows;
use crate::weight::Weight;
use crate::{dims, Error, Execution, Result};

/// Columns of a tile that are added to together, and rows of a block that are added at once: both fit the first-level
/// cache, where rows may meet in the same sets of eight places.
const COLUMNS: usize = 256;
const ROWS: usize = 8;

/// Rows of a block in which descents go on together. Fewer rows read `S` more often; more rows know less of each other.
/// A sweep takes one tile at a time: two cost 1 to 2 % of the loss.
pub const TOGETHER: usize = 4 * LANES;

/// How the loss fell.
#[derive(Clone, Debug, PartialEq)]
pub struct CoupledReport {
    /// `tr(A D S D^T)` after the sweep over rows.
    pub swept: f64,
    /// At the end.
    pub settled: f64,
    /// Rows changed after the sweep, counted once a pass.
    pub replaced: u64,
}

/// Rows of one block in the order of their solution.
struct Block<'a> {
    /// Place of its first row in the weight.
    from: usize,
    /// Rows of the block in the order of solution.
    order: &'a [usize],
    left: DampedHessian<'a>,
    /// `A`, in the block's own order.
    metric: Square<'a>,
    target: Vec<f64>,
    /// `D`.
    error: Vec<f64>,
    /// `D S`, once the sweep has ended.
    image: Vec<f64>,
    out: Quantized,
    replaced: u64,
    /// What the descents after the sweep took off the loss.
    gained: f64,
}

/// A tile as it stood before descents went on in it.
struct Begun {
    first: usize,
    /// Half the gradient of the whole loss; it follows what is taken over.
    slope: Vec<Lane>,
    values: Vec<Lane>,
    /// Of the tile's own loss.
    gradient: Vec<Lane>,
}

/// Blocks that go through their rows together. Teams share the pool, so that a thread that is done helps the others.
struct Team<'a> {
    problem: &'a Problem<'a>,
    execution: Execution<'a>,
    blocks: Vec<Block<'a>>,
}

/// Quantizes `W`; `left` are the metrics of consecutive blocks of rows, which are coupled within only. Up to `passes`
/// times the descents go on in every row.
pub fn coupled(
    w: Weight<'_>,
    input: &DampedHessian<'_>,
    left: &[DampedHessian<'_>],
    settings: &Settings,
    passes: usize,
    execution: &Execution<'_>,
) -> Result<(Quantized, CoupledReport)> {
    let problem = Problem::new(w, input, settings)?;
    let covered: usize = left.iter().map(|l| l.factor().dim()).sum();
    if covered != w.rows() {
        return Err(Error::shape("A", w.rows(), covered));
    }
    let pool = execution.pool()?;
    let mut from = 0;
    let mut teams: Vec<Team<'_>> = Vec::new();
    for blocks in left.chunks(left.len().div_ceil(pool.current_num_threads()).max(1)) {
        let mut team = Team { problem: &problem, execution: *execution, blocks: Vec::new() };
        for &block in blocks {
            let n = block.factor().dim();
            team.blocks.push(Block::new(w.slice(from, n), from, &problem, block)?);
            from += n;
        }
        teams.push(team);
    }
    let solved: Vec<Result<(Vec<Block<'_>>, f64, f64)>> =
        pool.install(|| teams.into_par_iter().with_max_len(1).map(|team| team.run(passes)).collect());
    let mut out = Quantized { codes: Vec::new(), scales: Vec::new() };
    let mut report = CoupledReport { swept: 0.0, settled: 0.0, replaced: 0 };
    for team in solved {
        let (blocks, swept, settled) = team?;
        report.swept += swept;
        report.settled += settled;
        for block in blocks {
            report.replaced += block.replaced;
            extend("codes", &mut out.codes, &block.out.codes)?;
            extend("scales", &mut out.scales, &block.out.scales)?;
        }
    }
    Ok((out, report))
}

impl<'a> Team<'a> {
    fn run(mut self, passes: usize) -> Result<(Vec<Block<'a>>, f64, f64)> {
        let rows = self.blocks.iter().map(Block::rows).max().unwrap_or(0);
        for first in (0..rows).step_by(LANES) {
            self.sweep(first)?;
        }
        for block in &mut self.blocks {
            block.image = self.problem.images(&block.error, &self.execution)?;
        }
        for _ in 0..passes {
            let before: u64 = self.blocks.iter().map(|b| b.replaced).sum();
            for first in (0..rows).step_by(TOGETHER) {
                self.go_on(first)?;
            }
            if self.blocks.iter().map(|b| b.replaced).sum::<u64>() == before {
                break;
            }
        }
        let settled = self.loss()?;
        let gained: f64 = self.blocks.iter().map(|b| b.gained).sum();
        Ok((self.blocks, settled + gained, settled))
    }

    /// Solves one tile of each block for the first time.
    fn sweep(&mut self, first: usize) -> Result<()> {
        let (dim, groups) = (self.problem.dim, self.problem.grid.n_groups(self.problem.dim));
        let mut wanted: Vec<f32> = Vec::new();
        let mut rows: Vec<(usize, usize)> = Vec::new();
        for (b, block) in self.blocks.iter().enumerate().filter(|(_, block)| first < block.rows()) {
            let shift = block.shift(first, self.problem, &self.execution)?;
            for i in 0..block.lanes(first) {
                let target = &block.target[(first + i) * dim..(first + i + 1) * dim];
                let row = target.iter().zip(&shift).map(|(target, shift)| (target - shift[i]) as f32);
                extend(SCRATCH, &mut wanted, &collected(SCRATCH, row)?)?;
                rows.push((b, first + i));
            }
        }
        // These rows count from 0 and in the order of their solution.
        let w = Weight::new("the target of the rows", &wanted, rows.len(), dim)?;
        let place = |at: usize| {
            let (b, row) = rows[at];
            self.blocks[b].from + self.blocks[b].order[row]
        };
        let (part, _) = self.problem.solve(w, &self.execution).map_err(|e| e.moved(place))?;
        for (at, &(b, row)) in rows.iter().enumerate() {
            let block = &mut self.blocks[b];
            let (to, codes) = (block.order[row], &part.codes[at * dim..(at + 1) * dim]);
            let (own, from) = (to * groups..(to + 1) * groups, at * groups..(at + 1) * groups);
            block.out.codes[to * dim..(to + 1) * dim].copy_from_slice(codes);
            block.out.scales[own].copy_from_slice(&part.scales[from.clone()]);
            let places = row * dim..(row + 1) * dim;
            let (error, target) = (&mut block.error[places.clone()], &block.target[places]);
            for (j, (error, target)) in error.iter_mut().zip(target).enumerate() {
                let one = &part.scales[from.start + self.problem.group_of(j)];
                let step = self.problem.rounding.step(codes[j], f32::from(one.zero));
                *error = f64::from(step * one.scale) + f64::from(one.offset) - target;
            }
        }
        Ok(())
    }

    /// Descends in some rows of each block with all other rows fixed, and takes over what lowers the whole loss.
    fn go_on(&mut self, from: usize) -> Result<()> {
        let problem = self.problem;
        let (mut owners, mut tiles, mut begun) = (Vec::new(), Vec::new(), Vec::new());
        for (b, block) in self.blocks.iter().enumerate() {
            let slopes = block.slopes(from, problem, &self.execution)?;
            for (first, slope) in (from..).step_by(LANES).zip(slopes) {
                let tile = block.tile(first, problem, &slope)?;
                let (values, gradient) = (copied(SCRATCH, &tile.values)?, copied(SCRATCH, &tile.gradient)?);
                owners.push(b);
                tiles.push(tile);
                begun.push(Begun { first, slope, values, gradient });
            }
        }
        problem.descend(&mut tiles, &self.execution)?;
        let mut done = 0;
        for own in owners.chunk_by(|a, b| a == b) {
            let its = done..done + own.len();
            self.blocks[own[0]].take(problem, &tiles[its.clone()], &mut begun[its])?;
            done += own.len();
        }
        Ok(())
    }

    /// `tr(A D S D^T)`, where two rows count twice unless they are gone on with together.
    fn loss(&self) -> Result<f64> {
        let (mut total, dim) = (0.0, self.problem.dim);
        for block in &self.blocks {
            for from in (0..block.rows()).step_by(TOGETHER) {
                let times = |k: usize| if k < TOGETHER { 1.0 } else { 2.0 };
                let by = |k: usize, row: usize| times(k) * block.entry(row, from + k);
                let (image, rows) = (&block.image[from * dim..], block.together(from));
                let slopes = Block::sums(image, rows, by, self.problem, &self.execution)?;
                for (first, slope) in (from..).step_by(LANES).zip(slopes) {
                    for i in 0..block.lanes(first) {
                        let error = block.error[(first + i) * dim..].iter();
                        total += slope.iter().zip(error).map(|(slope, error)| slope[i] * error).sum::<f64>();
                    }
                }
            }
        }
        Ok(total)
    }
}

impl<'a> Block<'a> {
    fn new(w: Weight<'_>, from: usize, problem: &Problem<'_>, left: DampedHessian<'a>) -> Result<Self> {
        let (rows, dim, order) = (w.rows(), w.dim(), left.factor().order());
        let size = dims::product("errors of the rows", rows, dim)?;
        let mut target = zeros("the target of the rows", size)?;
        for (to, &r) in target.chunks_exact_mut(dim).zip(order) {
            for (to, &v) in to.iter_mut().zip(&w.values()[r * dim..(r + 1) * dim]) {
                *to = f64::from(v);
            }
        }
        Ok(Self {
            from,
            order,
            left,
            metric: left.matrix()?,
            target,
            error: zeros("errors of the rows", size)?,
            image: Vec::new(),
            out: Quantized::zeroed(rows, dim, &problem.grid)?,
            replaced: 0,
            gained: 0.0,
        })
    }

    fn rows(&self) -> usize {
        self.order.len()
    }

    /// Rows of the tile that begins at `first`.
    fn lanes(&self, first: usize) -> usize {
        LANES.min(self.rows() - first)
    }

    /// Entry of `A` for two places of the order.
    fn entry(&self, i: usize, k: usize) -> f64 {
        self.metric.at(self.order[i], self.order[k])
    }

    /// The shift of a tile's targets by the errors of the rows before. Rows of the same tile have no codes yet: they
    /// stand at their own best real values.
    fn shift(&self, first: usize, problem: &Problem<'_>, execution: &Execution<'_>) -> Result<Vec<Lane>> {
        let factor = self.left.factor();
        let (by, rows) = (|k: usize, row: usize| factor.entry(k, row), first..first + self.lanes(first));
        let before = &self.error[..first * problem.dim];
        let mut shift = Self::sums(before, rows, by, problem, execution)?.swap_remove(0);
        for i in 1..self.lanes(first) {
            for k in 0..i {
                let by = factor.entry(first + k, first + i);
                for lane in &mut shift {
                    lane[i] -= by * lane[k];
                }
            }
        }
        Ok(shift)
    }

    /// Rows that are gone on with together.
    fn together(&self, from: usize) -> Range<usize> {
        from..self.rows().min(from + TOGETHER)
    }

    /// Half the gradient of the whole loss in these rows by tile, `A Z`.
    fn slopes(
        &self,
        from: usize,
        problem: &Problem<'_>,
        execution: &Execution<'_>,
    ) -> Result<Vec<Vec<Lane>>> {
        let by = |k: usize, row: usize| self.entry(row, k);
        Self::sums(&self.image, self.together(from), by, problem, execution)
    }

    /// Rows of a matrix added up for each row of some tiles, `sum_k by(k, row) rows_k`. One reading serves all tiles.
    fn sums(
        rows: &[f64],
        places: Range<usize>,
        by: impl Fn(usize, usize) -> f64,
        problem: &Problem<'_>,
        execution: &Execution<'_>,
    ) -> Result<Vec<Vec<Lane>>> {
        let (dim, end) = (problem.dim, places.end);
        let (mut out, mut factors) = (Vec::new(), Vec::new());
        for first in places.step_by(LANES) {
            let lane =
                |k: usize| std::array::from_fn(|i| if first + i < end { by(k, first + i) } else { 0.0 });
            let lanes: Vec<Lane> = collected(SCRATCH, (0..rows.len() / dim).map(lane))?;
            factors.push(lanes);
            out.push(zeros(SCRATCH, dim)?);
        }
        for from in (0..dim).step_by(COLUMNS) {
            let strip = from..dim.min(from + COLUMNS);
            for (chunk, rows) in rows.chunks(ROWS * dim).enumerate() {
                execution.check()?;
                let mut parts: [&[f64]; ROWS] = [&[]; ROWS];
                for (part, row) in parts.iter_mut().zip(rows.chunks_exact(dim)) {
                    *part = &row[strip.clone()];
                }
                let n = rows.len() / dim;
                for (out, by) in out.iter_mut().zip(&factors) {
                    let by = &by[chunk * ROWS..][..n];
                    add_rows(problem.isa, &mut out[strip.clone()], &parts[..n], by);
                }
            }
        }
        Ok(out)
    }

    /// The current tile, with the gradient of its loss when all other rows are fixed, in units of each row's own entry
    /// of `A`. Its loss counts its own error only; a gain is small relative to that.
    fn tile(&self, first: usize, problem: &Problem<'_>, slope: &[Lane]) -> Result<Tile> {
        let (dim, groups, n) = (problem.dim, problem.grid.n_groups(problem.dim), self.lanes(first));
        let (mut codes, mut scales) = (zeros(SCRATCH, n * dim)?, Vec::new());
        for i in 0..n {
            let from = self.order[first + i];
            codes[i * dim..(i + 1) * dim].copy_from_slice(&self.out.codes[from * dim..(from + 1) * dim]);
            extend(SCRATCH, &mut scales, &self.out.scales[from * groups..(from + 1) * groups])?;
        }
        let mut tile = Tile::new(problem, (&codes, &scales), 0, n)?;
        for i in 0..n {
            let own = self.entry(first + i, first + i);
            for (to, slope) in tile.gradient.iter_mut().zip(slope) {
                to[i] = slope[i] / own;
            }
            let places = (first + i) * dim..(first + i + 1) * dim;
            let (error, image) = (&self.error[places.clone()], &self.image[places]);
            tile.loss[i] = error.iter().zip(image).map(|(error, image)| error * image).sum();
        }
        Ok(tile)
    }

    /// Takes over the rows of tiles in which the whole loss falls.
    fn take(&mut self, problem: &Problem<'_>, tiles: &[Tile], begun: &mut [Begun]) -> Result<()> {
        let (dim, groups) = (problem.dim, problem.grid.n_groups(problem.dim));
        for (t, tile) in tiles.iter().enumerate() {
            for i in 0..self.lanes(begun[t].first) {
                let Begun { first, slope, values, gradient } = &begun[t];
                let (row, own) = (first + i, self.entry(first + i, first + i));
                let change = |j: usize| tile.values[j][i] - values[j][i];
                let image = |j: usize| tile.gradient[j][i] - gradient[j][i];
                let gain: f64 = (0..dim).map(|j| change(j) * (2.0 * slope[j][i] + own * image(j))).sum();
                if !(gain < 0.0) {
                    continue;
                }
                self.replaced += 1;
                self.gained -= gain;
                for j in 0..dim {
                    self.error[row * dim + j] += change(j);
                    self.image[row * dim + j] += image(j);
                }
                let to = self.order[row];
                let codes = &mut self.out.codes[to * dim..(to + 1) * dim];
                tile.store(problem, i, codes, &mut self.out.scales[to * groups..(to + 1) * groups]);
                let moved: Vec<f64> = collected(SCRATCH, (0..dim).map(image))?;
                for other in &mut begun[t..] {
                    let n = self.lanes(other.first);
                    let by: Lane =
                        std::array::from_fn(|k| if k < n { self.entry(other.first + k, row) } else { 0.0 });
                    add_rows(problem.isa, &mut other.slope, &[&moved], &[by]);
                }
            }
        }
        Ok(())
    }
}
