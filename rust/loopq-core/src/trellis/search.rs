//! The search of one column: Viterbi's algorithm over the nodes of the trellis, with rows that are coupled.
//!
//! With `A = U diag(p) U^T` the cost of a row is `p_i (e_i + sum_{h<i} U_hi e_h)^2`, which depends on the path: every
//! path has its own errors (`coupled`). The bits that both ends of a stream share are those of a first search through the
//! seam.

use crate::factor::DampedFactor;
use crate::grid::{value, Trellis};
use crate::memory::{collected, zeros};
use crate::simd::Isa;
use crate::trellis::paths::Paths;
use crate::trellis::row::{Row, SCRATCH};
use crate::Result;

/// Rows at both sides of the seam that decide the bits shared by the two ends of a stream.
const SEAM: usize = 24;

/// Searches the columns of one run of rows; memory is kept from column to column.
pub(super) struct Search {
    trellis: Trellis,
    rows: usize,
    /// Roots of `p_i` over its mean.
    roots: Vec<f32>,
    /// `U_hi` at `i * rows + h`; nothing where no rows are coupled.
    coupling: Vec<f32>,
    target: Vec<f32>,
    scale: Vec<f32>,
    paths: Paths,
}

impl Search {
    pub(super) fn new(trellis: Trellis, left: &DampedFactor<f64>) -> Result<Self> {
        let rows = left.dim();
        let mean = left.pivots().iter().sum::<f64>() / rows as f64;
        let coupled = (0..rows).any(|i| (0..i).any(|h| left.entry(h, i) != 0.0));
        let mut coupling: Vec<f32> = zeros(SCRATCH, if coupled { rows * rows } else { 0 })?;
        for (i, row) in coupling.chunks_exact_mut(rows).enumerate() {
            for (h, to) in row[..i].iter_mut().enumerate() {
                *to = left.entry(h, i) as f32;
            }
        }
        Ok(Self {
            trellis,
            rows,
            roots: collected(SCRATCH, left.pivots().iter().map(|p| (p / mean).sqrt() as f32))?,
            coupling,
            target: zeros(SCRATCH, rows)?,
            scale: zeros(SCRATCH, rows)?,
            paths: Paths::new(trellis, Isa::best(), rows.max(2 * SEAM), coupled)?,
        })
    }

    /// Writes the codes of a column that is near `target` in the metric `A`.
    pub(super) fn run(&mut self, target: &[f64], scale: &[f32], codes: &mut [u8]) -> Result<()> {
        let square = scale.iter().map(|&s| f64::from(s).powi(2)).sum::<f64>() / self.rows as f64;
        // In single precision: sizes are brought near one.
        let size = if square > 0.0 { square.sqrt() } else { 1.0 };
        for (to, from) in self.target.iter_mut().zip(target) {
            *to = (from / size) as f32;
        }
        for (to, &from) in self.scale.iter_mut().zip(scale) {
            *to = (f64::from(from) / size) as f32;
        }
        if self.rows * self.trellis.bits() as usize <= self.trellis.state_bits() as usize {
            self.try_all(codes);
            return Ok(());
        }
        self.viterbi(codes)
    }

    /// For a stream that is no longer than a state: every one is tried.
    fn try_all(&self, codes: &mut [u8]) {
        let (bits, rows) = (self.trellis.bits() as usize, self.rows);
        let digit = |stream: usize, i: usize| (stream >> (bits * i) & (self.trellis.digits() - 1)) as u8;
        let cost = |stream: usize| -> f32 {
            let states = self.trellis.states_of((0..rows).map(|i| digit(stream, i)));
            // No more rows than a state has bits.
            let mut errors = [0.0_f32; 16];
            for (i, (error, state)) in errors.iter_mut().zip(states).enumerate() {
                *error = self.scale[i] * value(state as u32) - self.target[i];
            }
            let row = |i: usize| {
                let coupling = self.coupling.get(i * rows..i * rows + i).unwrap_or(&[]);
                let others: f32 = coupling.iter().zip(&errors).map(|(c, e)| c * e).sum();
                (self.roots[i] * (errors[i] + others)).powi(2)
            };
            (0..rows).map(row).sum()
        };
        let costs = (0..1 << (bits * rows)).map(|stream| (cost(stream), stream));
        let best = costs.min_by(|(a, _), (b, _)| a.total_cmp(b)).map_or(0, |(_, stream)| stream);
        for (i, code) in codes.iter_mut().enumerate() {
            *code = digit(best, i);
        }
    }

    fn viterbi(&mut self, codes: &mut [u8]) -> Result<()> {
        let shared = self.seam()?;
        let rows = collected(SCRATCH, 0..self.rows)?;
        self.advance(&rows, Some(shared), 0)?;
        let (mut node, mask) = (shared, self.trellis.digits() - 1);
        for at in rows.into_iter().rev() {
            let state = self.paths.state(at, node);
            codes[at] = (state & mask) as u8;
            node = state >> self.trellis.bits();
        }
        Ok(())
    }

    /// Bits that both ends share: those of the best path through the seam.
    fn seam(&mut self) -> Result<usize> {
        let width = SEAM.min(self.rows);
        let rows: Vec<usize> = (self.rows - width..self.rows).chain(0..width).collect();
        self.advance(&rows, None, width)?;
        let before = |node: usize, at: usize| self.paths.state(at, node) >> self.trellis.bits();
        Ok((width..2 * width).rev().fold(self.paths.best(), before))
    }

    /// Goes over `rows` from a node, or any. Those from place `coupled` on begin with row 0 and are coupled with each
    /// other; those before with none.
    fn advance(&mut self, rows: &[usize], node: Option<usize>, coupled: usize) -> Result<()> {
        self.paths.begin(node, self.roots[rows[0]] * self.target[rows[0]]);
        for (at, &row) in rows.iter().enumerate() {
            let next = rows.get(at + 1).copied().unwrap_or(row);
            let known = if at >= coupled && !self.coupling.is_empty() { row + 1 } else { 0 };
            self.paths.go(&Row {
                at,
                scale: self.scale[row],
                target: self.target[row],
                root: self.roots[row],
                coupling: if known > 0 { &self.coupling[next * self.rows..][..known] } else { &[] },
                wanted: self.target[next],
                next_root: self.roots[next],
                all: at + self.trellis.state_bits().div_ceil(self.trellis.bits()) as usize >= rows.len(),
            })?;
        }
        Ok(())
    }
}
