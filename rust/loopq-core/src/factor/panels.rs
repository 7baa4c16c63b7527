//! An upper triangle cut in panels of columns, each stored as contiguous lines.

use crate::pages::Pages;
use crate::simd::Real;

/// Columns per panel: a multiple of both tile widths, wide enough that a factorisation passes over memory rarely.
pub(crate) const PANEL_WIDTH: usize = 192;

/// Rows `0..end` of every panel of columns; entry `(i, j)` is `panels[j / W][i * W + j % W]`. Columns past the last are
/// zero. Takes about half of the full matrix.
#[derive(Debug)]
pub(crate) struct Panels<T> {
    pub(crate) dim: usize,
    pub(crate) panels: Vec<Pages<T>>,
}

impl<T: Real> Panels<T> {
    /// Room for the upper triangle of a `dim` x `dim` matrix.
    pub(crate) fn zeros(dim: usize) -> Self {
        let panels = (0..dim.div_ceil(PANEL_WIDTH))
            .map(|p| Pages::zeroed(dim.min((p + 1) * PANEL_WIDTH) * PANEL_WIDTH))
            .collect();
        Self { dim, panels }
    }

    /// The matrix row-major and full, zero below its diagonal.
    pub(crate) fn dense(&self) -> Vec<T> {
        let dim = self.dim;
        let mut out = vec![T::default(); dim * dim];
        for i in 0..dim {
            for j in i..dim {
                out[i * dim + j] = self.panels[j / PANEL_WIDTH][i * PANEL_WIDTH + j % PANEL_WIDTH];
            }
        }
        out
    }

    /// The lines of the panel of column `j` from `(i, j)` on.
    #[inline]
    pub(crate) fn lines(&self, i: usize, j: usize) -> &[T] {
        &self.panels[j / PANEL_WIDTH][i * PANEL_WIDTH + j % PANEL_WIDTH..]
    }
}
