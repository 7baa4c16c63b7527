//! Rows of a weight taken through all stages: GPTQ, descents, and again from the scales found.

use rayon::prelude::*;

use crate::coordinate::tile::{Tile, TILES};
use crate::coordinate::{Problem, SCRATCH};
use crate::gptq::{again, gptq, Options, Scales, BLOCK_SIZE};
use crate::grid::{GroupScale, Quantized};
use crate::lanes::{columns_of, Lane, LANES};
use crate::memory::{collected, copied, gathered, reserve};
use crate::weight::Weight;
use crate::{Execution, Result};

/// Relative gain below which a row is done.
pub const SETTLED: f64 = 1e-3;

/// Most turns of a descent on codes and one on scales.
pub const TURNS: usize = 3;

/// How the loss of some rows fell.
pub(super) struct Course {
    pub(super) swept: Vec<f64>,
    pub(super) settled: Vec<f64>,
    pub(super) moves: u64,
    pub(super) rounds: usize,
}

/// Codes (rows, dim) and scales (rows, groups) of a batch.
type Found<'a> = (&'a mut [u8], &'a mut [GroupScale]);

impl Problem<'_> {
    /// Quantizes the rows of a weight.
    pub(super) fn solve(&self, w: Weight<'_>, execution: &Execution<'_>) -> Result<(Quantized, Vec<Course>)> {
        let (mut out, _) = gptq(w, self.factor, &self.grid, &self.sweep(), execution)?;
        let (dim, groups, pool) = (self.dim, self.grid.n_groups(self.dim), execution.pool()?);
        // At least two batches per thread, so that none waits long for the last.
        let tiles = (w.rows().div_ceil(LANES) / (2 * pool.current_num_threads())).clamp(1, TILES);
        let rows = tiles * LANES;
        let courses = pool.install(|| {
            let batches = out
                .codes
                .par_chunks_mut(rows * dim)
                .zip(out.scales.par_chunks_mut(rows * groups))
                .with_max_len(1)
                .enumerate()
                .map(|(b, (codes, scales))| {
                    let w = w.slice(b * rows, codes.len() / dim);
                    self.settle(w, (codes, scales), execution)
                });
            gathered(SCRATCH, batches)
        })?;
        let mut found = Vec::new();
        reserve(SCRATCH, &mut found, courses.len())?;
        for course in courses {
            found.push(course?);
        }
        Ok((out, found))
    }

    /// The options of GPTQ in this solver.
    fn sweep(&self) -> Options {
        Options { scales: Scales::Static, block_size: BLOCK_SIZE, beam: self.settings.beam, isa: self.isa }
    }

    /// Lowers the loss of a batch of rows that GPTQ has found, in place. New scales can make a better start than the
    /// place where the old codes are stuck: every round but the first begins with GPTQ again, for the rows that gained in
    /// the one before.
    fn settle(&self, w: Weight<'_>, found: Found<'_>, execution: &Execution<'_>) -> Result<Course> {
        execution.check()?;
        let (codes, scales) = found;
        let (dim, groups) = (self.dim, self.grid.n_groups(self.dim));
        let mut tiles = self.load(w, (codes, scales), execution)?;
        let swept = losses(&tiles, w.rows())?;
        let (mut settled, mut moves, mut rounds) = (copied(SCRATCH, &swept)?, 0, 0);
        let mut live: Vec<usize> = collected(SCRATCH, 0..w.rows())?;
        while rounds < self.settings.rounds && !live.is_empty() {
            if rounds > 0 {
                let values = gather(w.values(), dim, &live)?;
                let scales = gather(scales, groups, &live)?;
                let w = Weight::new("W", &values, live.len(), dim)?;
                let next = again(w, self.factor, &self.grid, &self.sweep(), &scales, execution)?;
                tiles = self.load(w, (&next.codes, &scales), execution)?;
            }
            moves += self.descend(&mut tiles, execution)?;
            let mut at = 0;
            live.retain(|&row| {
                let (tile, r, best) = (&tiles[at / LANES], at % LANES, settled[row]);
                at += 1;
                if tile.loss[r] < best {
                    settled[row] = tile.loss[r];
                    let codes = &mut codes[row * dim..(row + 1) * dim];
                    tile.store(self, r, codes, &mut scales[row * groups..(row + 1) * groups]);
                }
                is_gain(tile.loss[r], best)
            });
            rounds += 1;
        }
        Ok(Course { swept, settled, moves, rounds })
    }

    /// Tiles of rows with the codes and scales given.
    fn load(
        &self,
        w: Weight<'_>,
        found: (&[u8], &[GroupScale]),
        execution: &Execution<'_>,
    ) -> Result<Vec<Tile>> {
        let firsts = (0..w.rows()).step_by(LANES);
        let tiles = firsts.clone().map(|first| Tile::new(self, found, first, w.rows()));
        let mut tiles: Vec<Tile> = tiles.collect::<Result<_>>()?;
        let targets: Vec<Vec<Lane>> = firsts.map(|first| columns_of(w, first)).collect::<Result<_>>()?;
        self.start(&mut tiles, &targets, execution)?;
        Ok(tiles)
    }

    /// Descends on codes and on scales in turn, until neither gains.
    pub(super) fn descend(&self, tiles: &mut [Tile], execution: &Execution<'_>) -> Result<u64> {
        let mut moves = 0;
        for _ in 0..TURNS {
            let before: Vec<Lane> = tiles.iter().map(|tile| tile.loss).collect();
            moves += self.change_codes(tiles, self.settings.sweeps, execution)?;
            if !self.settings.refit {
                break;
            }
            self.change_scales(tiles, execution)?;
            for (tile, before) in tiles.iter_mut().zip(before) {
                for r in 0..LANES {
                    tile.active[r] &= is_gain(tile.loss[r], before[r]);
                }
            }
            if !tiles.iter().any(Tile::is_active) {
                break;
            }
        }
        Ok(moves)
    }
}

fn losses(tiles: &[Tile], rows: usize) -> Result<Vec<f64>> {
    collected(SCRATCH, (0..rows).map(|i| tiles[i / LANES].loss[i % LANES]))
}

/// Some rows of a matrix.
fn gather<T: Copy>(all: &[T], width: usize, rows: &[usize]) -> Result<Vec<T>> {
    let mut found = Vec::new();
    reserve(SCRATCH, &mut found, rows.len() * width)?;
    for &row in rows {
        found.extend_from_slice(&all[row * width..(row + 1) * width]);
    }
    Ok(found)
}

/// Whether a loss is so much lower that going on is worth it; one of zero, or lower by rounding error, is not.
fn is_gain(now: f64, before: f64) -> bool {
    now < before * (1.0 - SETTLED)
}
