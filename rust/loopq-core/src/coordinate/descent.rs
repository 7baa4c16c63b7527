//! Coordinate descent: one code, or one scale, at a time is changed to the best one given all others.
//!
//! For a code of column `j` the loss is a parabola in its value, lowest at `q_j - G_j / S_jj` with `G = (W^ - W) S`; the
//! best code is the nearest to that. As a layer-wise quantizer it is found in K. Behdin et al., *QuantEase* (2023,
//! arXiv:2309.01885). For the scale of a group with code steps `b` it is lowest at `s - (b G_g) / (b S_gg b)`; for an offset
//! or a shared unit `b` is how values change with it.
//!
//! `G` follows every change by one row of `S`. Inside a block of columns it does so at once; everywhere else the changes of
//! a block are added together, for all tiles in turn while the block's rows of `S` are in the cache.

use std::ops::Range;

use crate::coordinate::tile::{values_of, Tile, TILES};
use crate::coordinate::{Problem, SCRATCH};
use crate::grid::{by_steps, GroupScale, Part, Steps};
use crate::lanes::{Lane, LANES};
use crate::memory::{collected, zeros};
use crate::simd::{add_rows, per_isa};
use crate::{Execution, Result};

/// Columns in a block: their changes reach the other columns only after the whole block is done.
const COLUMNS: usize = 64;

/// Columns of the gradient that are brought up to date together: as many of a block's rows of `S` fit the second-level
/// cache.
const STRIP: usize = 2048;

/// Changes of some columns of one tile.
#[derive(Default)]
struct Changes {
    columns: Vec<usize>,
    by: Vec<Lane>,
}

impl Problem<'_> {
    /// Sets gradient and loss of tiles for the given `targets`.
    pub(super) fn start(
        &self,
        tiles: &mut [Tile],
        targets: &[Vec<Lane>],
        execution: &Execution<'_>,
    ) -> Result<()> {
        for block in self.blocks() {
            execution.check()?;
            let error = |(tile, target): (&Tile, &Vec<Lane>)| Changes {
                columns: block.clone().collect(),
                by: block.clone().map(|j| difference(&tile.values[j], &target[j])).collect(),
            };
            let changes: Vec<Changes> = tiles.iter().zip(targets).map(error).collect();
            self.follow(tiles, &changes, 0..0, execution)?;
        }
        for (tile, target) in tiles.iter_mut().zip(targets) {
            let errors = tile.values.iter().zip(target).map(|(a, b)| difference(a, b));
            let errors: Vec<Lane> = collected(SCRATCH, errors)?;
            tile.loss = inner(&errors, &tile.gradient);
        }
        Ok(())
    }

    /// Changes one code at a time, at most `sweeps` times round; returns the moves.
    pub(super) fn change_codes(
        &self,
        tiles: &mut [Tile],
        sweeps: usize,
        execution: &Execution<'_>,
    ) -> Result<u64> {
        let mut moves = vec![0; tiles.len()];
        let mut moving: Vec<bool> = tiles.iter().map(Tile::is_active).collect();
        for _ in 0..sweeps {
            let before = moves.clone();
            for block in self.blocks() {
                execution.check()?;
                let visit = |(t, tile): (usize, &mut Tile)| {
                    if moving[t] {
                        self.visit(tile, block.clone(), &mut moves[t])
                    } else {
                        Changes::default()
                    }
                };
                let changes: Vec<Changes> = tiles.iter_mut().enumerate().map(visit).collect();
                self.follow(tiles, &changes, block, execution)?;
            }
            for (t, moving) in moving.iter_mut().enumerate() {
                *moving = moves[t] != before[t];
            }
            if !moving.contains(&true) {
                break;
            }
        }
        Ok(moves.iter().sum())
    }

    /// Changes the codes of a block and updates the block's gradient.
    fn visit(&self, tile: &mut Tile, block: Range<usize>, moves: &mut u64) -> Changes {
        let mut changes = Changes::default();
        for j in block.clone() {
            let group = self.group_of(j);
            let column = Column {
                energy: self.s.at(j, j),
                gradient: tile.gradient[j],
                values: tile.values[j],
                scale: tile.scales[group],
                zero: tile.zeros[group],
                offset: tile.offsets[group],
            };
            let mut best = Best::default();
            by_steps!(&self.rounding, |steps| best_steps(self.isa, &column, steps, &mut best));
            let Best { step, change: mut by, gain } = best;
            let mut moved = 0;
            for r in 0..LANES {
                // At a tie rounding error may call the same place better; only a real gain ends the search for sure.
                if gain[r] < 0.0 && tile.active[r] {
                    moved += 1;
                    tile.loss[r] += gain[r];
                    tile.steps[j][r] = step[r];
                    tile.values[j][r] += by[r];
                } else {
                    by[r] = 0.0;
                }
            }
            if moved > 0 {
                *moves += moved;
                let row = &self.s.row(j)[block.clone()];
                add_rows(self.isa, &mut tile.gradient[block.clone()], &[row], &[by]);
                changes.columns.push(j);
                changes.by.push(by);
            }
        }
        changes
    }

    /// One pass over all scales, changed one at a time. Where groups share units, this is one scale, offset or unit. A
    /// group without a step, or with a best scale that cannot be stored, keeps its scale.
    pub(super) fn change_scales(&self, tiles: &mut [Tile], execution: &Execution<'_>) -> Result<()> {
        let (size, block) = (self.grid.group(self.dim), self.grid.block(self.dim));
        let parts = self.grid.units().map_or(&[Part::Scale][..], |units| units.parts());
        for first in (0..self.dim).step_by(block) {
            let end = self.dim.min(first + block);
            let each = (first..end).step_by(size).map(|from| from..end.min(from + size));
            let (own, shared) = parts.split_at(parts.iter().filter(|p| p.is_own()).count());
            let own = each.flat_map(|columns| own.iter().map(move |&part| (part, columns.clone())));
            for (part, columns) in own.chain(shared.iter().map(|&part| (part, first..end))) {
                let change = |tile: &mut Tile| {
                    execution.check()?;
                    self.change_scale(tile, part, columns.clone())
                };
                let changes: Vec<Changes> = tiles.iter_mut().map(change).collect::<Result<_>>()?;
                self.follow(tiles, &changes, 0..0, execution)?;
            }
        }
        Ok(())
    }

    /// By how much the values of columns change with one part of their scales.
    fn slopes(&self, tile: &Tile, part: Part, columns: Range<usize>) -> Result<Vec<Lane>> {
        let slope = |j: usize| {
            let (g, steps) = (self.group_of(j), tile.steps[j]);
            let Some(units) = self.grid.units() else { return steps };
            std::array::from_fn(|r| match (part, units.counts(&tile.scale_of(g, r))) {
                (Part::Scale, _) => steps[r],
                (Part::Offset, _) => 1.0,
                (Part::ScaleUnit, (scales, _)) => steps[r] * scales,
                (Part::OffsetUnit, (_, offsets)) => offsets,
            })
        };
        collected(SCRATCH, columns.map(slope))
    }

    /// A scale with one part of it moved, as far as it can be stored.
    fn moved(&self, one: &GroupScale, part: Part, by: f64) -> GroupScale {
        if let Some(units) = self.grid.units() {
            return units.moved(one, part, by);
        }
        let scale = self.grid.scale_type.round(f64::from(one.scale) + by);
        let fits = scale.is_finite() && scale != 0.0 && (self.grid.signed || scale > 0.0);
        GroupScale { scale: if fits { scale } else { one.scale }, ..*one }
    }

    fn change_scale(&self, tile: &mut Tile, part: Part, columns: Range<usize>) -> Result<Changes> {
        if !tile.is_active() {
            return Ok(Changes::default());
        }
        let rows = collected(SCRATCH, columns.clone().map(|j| &self.s.row(j)[columns.clone()]))?;
        let image = |by: &[Lane]| -> Result<Vec<Lane>> {
            let mut out = zeros(SCRATCH, by.len())?;
            add_rows(self.isa, &mut out, &rows, by);
            Ok(out)
        };
        let gradient = &tile.gradient[columns.clone()];
        let slopes = self.slopes(tile, part, columns.clone())?;
        let (slope, curve) = (inner(&slopes, gradient), inner(&slopes, &image(&slopes)?));
        let groups = self.group_of(columns.start)..self.group_of(columns.end - 1) + 1;
        let one = |g: usize, r: usize| {
            let old = tile.scale_of(g, r);
            if tile.active[r] {
                self.moved(&old, part, -slope[r] / curve[r])
            } else {
                old
            }
        };
        let wanted = groups.clone().map(|g| std::array::from_fn(|r| one(g, r)));
        let wanted: Vec<[GroupScale; LANES]> = collected(SCRATCH, wanted)?;
        if groups.clone().zip(&wanted).all(|(g, new)| (0..LANES).all(|r| new[r] == tile.scale_of(g, r))) {
            return Ok(Changes::default());
        }
        let new = |j: usize| {
            let one = &wanted[self.group_of(j) - groups.start];
            values_of(&tile.steps[j], &one.map(|l| l.scale), &one.map(|l| f64::from(l.offset)))
        };
        let new: Vec<Lane> = collected(SCRATCH, columns.clone().map(new))?;
        let by = new.iter().zip(&tile.values[columns.clone()]).map(|(new, old)| difference(new, old));
        let mut by: Vec<Lane> = collected(SCRATCH, by)?;
        let (first, second) = (inner(&by, gradient), inner(&by, &image(&by)?));
        let gain: Lane = std::array::from_fn(|r| 2.0 * first[r] + second[r]);
        for r in (0..LANES).filter(|&r| gain[r] < 0.0) {
            for (g, one) in groups.clone().zip(&wanted) {
                tile.set(g, r, &one[r]);
            }
            tile.loss[r] += gain[r];
        }
        for ((by, new), value) in by.iter_mut().zip(&new).zip(&mut tile.values[columns.clone()]) {
            for r in 0..LANES {
                (by[r], value[r]) = if gain[r] < 0.0 { (by[r], new[r]) } else { (0.0, value[r]) };
            }
        }
        Ok(Changes { columns: collected(SCRATCH, columns)?, by })
    }

    /// Brings the gradients up to date with `changes`, one set per tile, in all columns but those `done`.
    fn follow(
        &self,
        tiles: &mut [Tile],
        changes: &[Changes],
        done: Range<usize>,
        execution: &Execution<'_>,
    ) -> Result<()> {
        for part in [0..done.start, done.end..self.dim] {
            for from in part.clone().step_by(STRIP) {
                let strip = from..part.end.min(from + STRIP);
                for (tile, changes) in tiles.iter_mut().zip(changes) {
                    execution.check()?;
                    let rows = changes.columns.iter().map(|&j| &self.s.row(j)[strip.clone()]);
                    let rows = collected(SCRATCH, rows)?;
                    if !rows.is_empty() {
                        add_rows(self.isa, &mut tile.gradient[strip.clone()], &rows, &changes.by);
                    }
                }
            }
        }
        Ok(())
    }

    /// `D S` for rows of `D`, row-major.
    pub(super) fn images(&self, rows: &[f64], execution: &Execution<'_>) -> Result<Vec<f64>> {
        let dim = self.dim;
        let mut out = zeros(SCRATCH, rows.len())?;
        let together = TILES * LANES * dim;
        for (rows, out) in rows.chunks(together).zip(out.chunks_mut(together)) {
            let row = |at: usize, j: usize| rows.get(at * dim + j).copied().unwrap_or(0.0);
            let mut images: Vec<Vec<Lane>> = Vec::new();
            for _ in (0..rows.len()).step_by(LANES * dim) {
                images.push(zeros(SCRATCH, dim)?);
            }
            for block in self.blocks() {
                execution.check()?;
                let s: Vec<&[f64]> = collected(SCRATCH, block.clone().map(|j| self.s.row(j)))?;
                for (t, image) in images.iter_mut().enumerate() {
                    let lane = |j: usize| std::array::from_fn(|r| row(t * LANES + r, j));
                    let by: Vec<Lane> = collected(SCRATCH, block.clone().map(lane))?;
                    add_rows(self.isa, image, &s, &by);
                }
            }
            for (at, out) in out.chunks_exact_mut(dim).enumerate() {
                for (to, lane) in out.iter_mut().zip(&images[at / LANES]) {
                    *to = lane[at % LANES];
                }
            }
        }
        Ok(out)
    }

    /// The columns of each block.
    fn blocks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let dim = self.dim;
        (0..dim).step_by(COLUMNS).map(move |first| first..dim.min(first + COLUMNS))
    }
}

/// One column of a tile.
#[derive(Clone, Copy)]
struct Column {
    energy: f64,
    gradient: Lane,
    values: Lane,
    scale: [f32; LANES],
    zero: Lane,
    offset: Lane,
}

/// The best step of every row of a column, and the change of its value and of its loss.
#[derive(Default)]
struct Best {
    step: Lane,
    change: Lane,
    gain: Lane,
}

per_isa! {
    fn best_steps<S: Steps>(c: &Column, steps: S, best: &mut Best) = best_body;
}

#[inline(always)]
fn best_body<S: Steps>(c: &Column, steps: S, best: &mut Best) {
    let c = *c;
    let wide = c.scale.map(f64::from);
    let mut step = [0.0; LANES];
    for r in 0..LANES {
        step[r] = (c.values[r] - c.offset[r] - c.gradient[r] / c.energy) / wide[r];
    }
    let step = steps.nearest(step, c.zero);
    let mut change = [0.0; LANES];
    for r in 0..LANES {
        change[r] = f64::from(step[r] as f32 * c.scale[r]) + c.offset[r] - c.values[r];
    }
    let mut gain = [0.0; LANES];
    for r in 0..LANES {
        gain[r] = change[r] * (2.0 * c.gradient[r] + change[r] * c.energy);
    }
    *best = Best { step, change, gain };
}

fn inner(a: &[Lane], b: &[Lane]) -> Lane {
    let mut out = [0.0; LANES];
    for (a, b) in a.iter().zip(b) {
        for r in 0..LANES {
            out[r] += a[r] * b[r];
        }
    }
    out
}

fn difference(a: &Lane, b: &Lane) -> Lane {
    std::array::from_fn(|r| a[r] - b[r])
}
