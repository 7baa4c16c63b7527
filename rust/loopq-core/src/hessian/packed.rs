//! Blocks of rows, packed in panels of columns for the multiplication.

use crate::dump::{RowType, Rows};
use crate::hessian::{BLOCK_ROWS, PANEL};
use crate::simd::{per_isa, tile_chains, tile_pairs, Isa, Real};

/// Rows of two chains of bf16 products, which are added to the sum together.
pub(super) const GROUP: usize = 32;
/// Lines of words that a panel has for such rows.
const WORD_LINES: usize = GROUP / 2;
/// Lines and columns of an AMX tile.
pub(super) const TILE: usize = 16;
/// Tiles beside each other in a panel.
pub(super) const TILES: usize = PANEL / TILE;

/// How the rows of a block lie in its panels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowOrder {
    /// Rows of float32 and float16: one to a line, in single precision.
    Single,
    /// Rows of bf16: the same, subnormal numbers as zeros.
    Chains,
    /// Two rows of bf16 to a line of words, the first in the high halves; zeros up to whole groups.
    Pairs,
    /// Rows of bf16 in tiles of 16 x 16 words. Word `k` holds row `k` of a group in its low half and row `16 + k` in
    /// its high half. A panel first has the words of each column, for the left factor:
    /// `[three times 16 columns][group][column][k]`. The words of each line follow, for the right factor:
    /// `[three times][group][k][column]`.
    Tiles,
}

impl RowOrder {
    /// Lines, or groups, that a panel has for so many rows.
    fn depth(self, n_rows: usize) -> usize {
        match self {
            Self::Single | Self::Chains => n_rows,
            Self::Pairs => n_rows.div_ceil(GROUP) * WORD_LINES,
            Self::Tiles => n_rows.div_ceil(GROUP),
        }
    }

    /// Words of a panel.
    fn panel(self, depth: usize) -> usize {
        depth * PANEL * if self == Self::Tiles { 2 * WORD_LINES } else { 1 }
    }

    /// Words that [`PackedBlock::pack`] needs for a block of `dim` columns.
    pub(super) fn n_words(self, dim: usize) -> usize {
        dim.div_ceil(PANEL) * self.panel(self.depth(BLOCK_ROWS))
    }
}

/// One block of rows (at most [`BLOCK_ROWS`]) as panels of [`PANEL`] columns; columns past the last are zero.
pub(super) struct PackedBlock<'a> {
    pub(super) layout: RowOrder,
    depth: usize,
    words: &'a [u32],
    /// For each panel the smallest exponent of a number that is not zero, where subnormal products have to be looked for.
    least: Vec<u16>,
}

impl<'a> PackedBlock<'a> {
    /// Packs rows into `scratch`, overwriting it.
    pub(super) fn pack(rows: Rows<'_>, layout: RowOrder, isa: Isa, scratch: &'a mut [u32]) -> Self {
        debug_assert!(rows.n_rows() <= BLOCK_ROWS);
        let depth = layout.depth(rows.n_rows());
        let words = &mut scratch[..rows.dim().div_ceil(PANEL) * layout.panel(depth)];
        match layout {
            RowOrder::Single | RowOrder::Chains => pack_single(isa, rows, bytemuck::cast_slice_mut(words)),
            RowOrder::Pairs => pack_pairs(isa, rows, words),
            RowOrder::Tiles => pack_tiles(isa, rows, words),
        }
        let least = match layout {
            RowOrder::Chains | RowOrder::Pairs => least_exponents(isa, rows),
            RowOrder::Single | RowOrder::Tiles => Vec::new(),
        };
        Self { layout, depth, words, least }
    }

    fn panel(&self, p: usize) -> &[u32] {
        let size = self.layout.panel(self.depth);
        &self.words[p * size..(p + 1) * size]
    }

    /// Sets `sums` to the products of some columns of panel `pi`, from its column `r` on, with panel `pj`. All lines
    /// go through one tile: its sums stay in registers, and both panels stream from the second-level cache.
    #[inline(always)]
    pub(super) fn strip(&self, isa: Isa, pi: usize, pj: usize, r: usize, sums: &mut [f32]) {
        let (a, b) = (self.panel(pi), self.panel(pj));
        match self.layout {
            RowOrder::Single => {
                let (a, b): (&[f32], &[f32]) = (bytemuck::cast_slice(a), bytemuck::cast_slice(b));
                sums.fill(0.0);
                f32::tile(isa, self.depth, &a[r..], PANEL, b, PANEL, sums, PANEL);
            }
            RowOrder::Chains => {
                let (a, b): (&[f32], &[f32]) = (bytemuck::cast_slice(a), bytemuck::cast_slice(b));
                tile_chains(isa, self.depth, &a[r..], b, sums, self.tiny(pi, pj));
            }
            RowOrder::Pairs => tile_pairs(isa, self.depth, &a[r..], b, sums, self.tiny(pi, pj)),
            RowOrder::Tiles => unreachable!("tiles are multiplied in squares of several panels"),
        }
    }

    /// The tiles of 16 columns, the `t`th of all, as left and as right factors.
    pub(super) fn tiles(&self, t: usize) -> [&[u32]; 2] {
        let (left, right) = self.panel(t / TILES).split_at(self.depth * PANEL * TILE);
        let run = self.depth * TILE * TILE;
        [left, right].map(|side| &side[t % TILES * run..][..run])
    }

    /// Whether a product of two panels, or a sum of such products, could be subnormal. A number of exponent `e` is a
    /// multiple of `2^(e - 7)`; products and sums of them are zero, or at least the product of these.
    fn tiny(&self, pi: usize, pj: usize) -> bool {
        const BIAS: u16 = 127;
        self.least[pi] + self.least[pj] < 2 * BIAS - 126 + 14
    }
}

/// Lines that are packed before the next panel's turn. A row holds a part of every panel; with one line at a time each of
/// these would be written to once per row, more places than a cache has lines for.
const LINES: usize = 8;

per_isa! {
    /// Packs rows one to a line, in single precision.
    fn pack_single(rows: Rows<'_>, lanes: &mut [f32]) = single_body;
}
per_isa! {
    /// Packs rows of bf16 two to a line.
    fn pack_pairs(rows: Rows<'_>, lanes: &mut [u32]) = pairs_body;
}
per_isa! {
    /// Packs rows of bf16 in tiles.
    fn pack_tiles(rows: Rows<'_>, words: &mut [u32]) = tiles_body;
}
per_isa! {
    /// For each panel the smallest biased exponent of a normal number; 255 without any.
    fn least_exponents(rows: Rows<'_>) -> Vec<u16> = least_body;
}

#[inline(always)]
fn single_body(rows: Rows<'_>, lanes: &mut [f32]) {
    let (depth, size) = (rows.n_rows(), rows.dtype().size());
    for first in (0..depth).step_by(LINES) {
        let near = rows.slice(first, LINES.min(depth - first));
        for p in 0..rows.dim().div_ceil(PANEL) {
            let lines = &mut lanes[(p * depth + first) * PANEL..][..near.n_rows() * PANEL];
            for (row, line) in near.bytes().chunks_exact(near.row_bytes()).zip(lines.chunks_exact_mut(PANEL))
            {
                let bytes = columns(row, p, size);
                let (line, past) = line.split_at_mut(bytes.len() / size);
                past.fill(0.0);
                match rows.dtype() {
                    RowType::F32 => {
                        for (lane, b) in line.iter_mut().zip(bytes.chunks_exact(4)) {
                            *lane = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                        }
                    }
                    RowType::Bf16 => {
                        for (lane, b) in line.iter_mut().zip(bytes.chunks_exact(2)) {
                            let bits = u16::from_le_bytes([b[0], b[1]]);
                            let bits = if bits & 0x7f80 == 0 { 0 } else { bits };
                            *lane = f32::from_bits(u32::from(bits) << 16);
                        }
                    }
                    RowType::F16 => {
                        for (lane, b) in line.iter_mut().zip(bytes.chunks_exact(2)) {
                            *lane = half::f16::from_le_bytes([b[0], b[1]]).to_f32();
                        }
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn pairs_body(rows: Rows<'_>, lanes: &mut [u32]) {
    let depth = RowOrder::Pairs.depth(rows.n_rows());
    for first in (0..depth).step_by(LINES) {
        for p in 0..rows.dim().div_ceil(PANEL) {
            let lines = &mut lanes[(p * depth + first) * PANEL..][..LINES * PANEL];
            for (k, line) in lines.chunks_exact_mut(PANEL).enumerate() {
                let at = 2 * (first + k);
                let (one, other) = (part(rows, at, p), part(rows, at + 1, p));
                let (line, past) = line.split_at_mut(one.len() / 2);
                past.fill(0);
                for ((lane, o), e) in line.iter_mut().zip(one.chunks_exact(2)).zip(other.chunks_exact(2)) {
                    *lane = u32::from_le_bytes([e[0], e[1], o[0], o[1]]);
                }
            }
        }
    }
}

#[inline(always)]
fn tiles_body(rows: Rows<'_>, words: &mut [u32]) {
    const WORDS: usize = TILE * TILE;
    let groups = RowOrder::Tiles.depth(rows.n_rows());
    for group in 0..groups {
        for (p, panel) in words.chunks_exact_mut(RowOrder::Tiles.panel(groups)).enumerate() {
            let (left, right) = panel.split_at_mut(groups * PANEL * TILE);
            let mut lines = [[0_u32; PANEL]; TILE];
            for (k, line) in lines.iter_mut().enumerate() {
                let at = group * GROUP + k;
                let (low, high) = (part(rows, at, p), part(rows, at + TILE, p));
                for ((word, l), h) in line.iter_mut().zip(low.chunks_exact(2)).zip(high.chunks_exact(2)) {
                    *word = u32::from_le_bytes([l[0], l[1], h[0], h[1]]);
                }
            }
            for t in 0..TILES {
                let tile = (t * groups + group) * WORDS..(t * groups + group + 1) * WORDS;
                for (k, to) in right[tile.clone()].chunks_exact_mut(TILE).enumerate() {
                    to.copy_from_slice(&lines[k][t * TILE..][..TILE]);
                }
                for (c, to) in left[tile].chunks_exact_mut(TILE).enumerate() {
                    for (k, word) in to.iter_mut().enumerate() {
                        *word = lines[k][t * TILE + c];
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn least_body(rows: Rows<'_>) -> Vec<u16> {
    /// The smallest bits of a normal number.
    const NORMAL: u16 = 0x80;
    // Zeros and subnormal numbers wrap round to the largest values.
    let mut least = vec![u16::MAX; rows.dim().div_ceil(PANEL)];
    for row in rows.bytes().chunks_exact(rows.row_bytes()) {
        for (p, least) in least.iter_mut().enumerate() {
            let bits = |b: &[u8]| (u16::from_le_bytes([b[0], b[1]]) & 0x7fff).wrapping_sub(NORMAL);
            *least = columns(row, p, 2).chunks_exact(2).fold(*least, |least, b| least.min(bits(b)));
        }
    }
    least.iter().map(|&bits| if bits < u16::MAX - NORMAL { (bits + NORMAL) >> 7 } else { 255 }).collect()
}

/// The part of row `r` of bf16 numbers in panel `p`; zeros past the last row.
#[inline(always)]
fn part(rows: Rows<'_>, r: usize, p: usize) -> &[u8] {
    if r < rows.n_rows() {
        return columns(rows.slice(r, 1).bytes(), p, 2);
    }
    &[0; 2 * PANEL][..2 * PANEL.min(rows.dim() - p * PANEL)]
}

/// The part of a row in panel `p`.
#[inline(always)]
fn columns(row: &[u8], p: usize, size: usize) -> &[u8] {
    &row[p * PANEL * size..row.len().min((p + 1) * PANEL * size)]
}
