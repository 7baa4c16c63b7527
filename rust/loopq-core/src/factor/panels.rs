//! An upper triangle cut in panels of columns, each stored as contiguous lines.

use crate::memory::Buffer;
use crate::simd::Real;
use crate::{Error, Result};

/// Columns per panel: a multiple of both tile widths, wide enough that a factorisation passes over memory rarely.
pub(crate) const PANEL_WIDTH: usize = 192;

/// Rows `0..end` of every panel of columns; entry `(i, j)` is `panels[j / W][i * W + j % W]`. Columns past the last are
/// zero. Takes about half of the full matrix.
#[derive(Debug)]
pub(super) struct Panels<T> {
    pub(super) dim: usize,
    pub(super) panels: Vec<Buffer<T>>,
}

impl<T: Real> Panels<T> {
    /// Zeros for the upper triangle of a `dim` x `dim` matrix.
    pub(super) fn zeros(dim: usize) -> Result<Self> {
        let size = |p: usize| dim.min((p + 1) * PANEL_WIDTH) * PANEL_WIDTH;
        let n_panels = dim.div_ceil(PANEL_WIDTH);
        let panels = (0..n_panels).map(|p| Buffer::zeroed("the factor of a Hessian", size(p)));
        let panels = panels.collect::<Result<_>>().map_err(|e| match e {
            // All of it is what there is no memory for.
            Error::OutOfMemory { what, .. } => {
                Error::OutOfMemory { what, bytes: (0..n_panels).map(size).sum::<usize>() * size_of::<T>() }
            }
            other => other,
        })?;
        Ok(Self { dim, panels })
    }

    /// Entry `(i, j)`, `i <= j`.
    #[inline]
    pub(super) fn at(&self, i: usize, j: usize) -> T {
        self.panels[j / PANEL_WIDTH][i * PANEL_WIDTH + j % PANEL_WIDTH]
    }

    /// The lines of the panel of column `j` from `(i, j)` on.
    #[inline]
    pub(super) fn lines(&self, i: usize, j: usize) -> &[T] {
        &self.panels[j / PANEL_WIDTH][i * PANEL_WIDTH + j % PANEL_WIDTH..]
    }

    /// Row `i` to the right of its diagonal, panel by panel: each piece with its first column.
    #[inline]
    pub(super) fn right_of_diagonal(&self, i: usize) -> impl Iterator<Item = (usize, &[T])> {
        let first = (i + 1) / PANEL_WIDTH;
        self.panels.iter().enumerate().skip(first).filter_map(move |(p, panel)| {
            let (from, to) = ((p * PANEL_WIDTH).max(i + 1), self.dim.min((p + 1) * PANEL_WIDTH));
            (from < to).then(|| (from, &panel[i * PANEL_WIDTH + from % PANEL_WIDTH..][..to - from]))
        })
    }
}
