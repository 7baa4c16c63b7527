//! Activations as integers: blocks of fixed-point numbers, cut into signed bytes.

use half::bf16;

use super::layout::{unit_inputs, Layout, LINE};
use loopq_core::memory::zeros;
use loopq_core::simd::{per_isa, Isa};
use loopq_core::{dims, Error, Result};

/// How finely activations enter the products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// One byte, scaled by the largest magnitude of the block over 127: W4A8.
    Int8,
    /// Two bytes, in steps of a power of two: within `2^-14` of the block's largest magnitude.
    Fixed16,
    /// Three bytes, in steps of a power of two: within `2^-22` of the block's largest magnitude.
    Fixed24,
}

impl Precision {
    /// Signed bytes of a number.
    pub(super) fn limbs(self) -> usize {
        match self {
            Self::Int8 => 1,
            Self::Fixed16 => 2,
            Self::Fixed24 => 3,
        }
    }
}

/// Activations (tokens, inputs), row-major.
#[derive(Clone, Copy, Debug)]
pub enum Inputs<'a> {
    /// float32.
    F32(&'a [f32]),
    /// The bits of bfloat16 numbers.
    Bf16(&'a [u16]),
}

impl Inputs<'_> {
    fn len(self) -> usize {
        match self {
            Self::F32(x) => x.len(),
            Self::Bf16(x) => x.len(),
        }
    }

    /// Tokens, if the inputs are whole ones.
    pub(super) fn tokens(self, inputs: usize) -> Result<usize> {
        if self.len().is_multiple_of(inputs) {
            return Ok(self.len() / inputs);
        }
        Err(Error::shape("activations", format!("a multiple of {inputs} values"), self.len()))
    }

    /// A token's activations as float32.
    fn read(self, token: usize, to: &mut [f32]) {
        let range = token * to.len()..(token + 1) * to.len();
        match self {
            Self::F32(x) => to.copy_from_slice(&x[range]),
            Self::Bf16(x) => {
                for (to, &x) in to.iter_mut().zip(&x[range]) {
                    *to = bf16::from_bits(x).to_f32();
                }
            }
        }
    }
}

/// Tokens of a tile.
pub(super) const TILE: usize = 16;
/// Bytes of a tile: 64 inputs of 16 tokens.
pub(super) const TILE_BYTES: usize = TILE * LINE;

/// In which order bytes of activations lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Token by token: row `token * limbs + i` holds limb `i`, with zeros between blocks.
    Rows,
    /// Sixteen tokens at a time: for every 64 inputs of a block the tiles of all limbs, with zeros at the end of blocks and for
    /// tokens that are missing.
    Tiles,
}

/// Some tokens' activations as integers.
///
/// Activation `k` of a block is `scale * sum_i limb_i[k] * 256^i`.
pub(crate) struct Rows {
    pub(super) order: Order,
    pub(super) limbs: usize,
    /// Bytes of a row.
    pub(super) stride: usize,
    bytes: Vec<i8>,
    /// Where they begin: on a cache line.
    begin: usize,
    /// For codes on a trellis, activations as numbers of 16 bits: row `token * words + i` holds the i-th of them.
    words: Vec<i16>,
    /// (tokens, blocks).
    pub(super) scales: Vec<f32>,
    /// Minus the sum of each limb over a block, (tokens, blocks, limbs): the factor of a zero point.
    pub(super) minus_sums: Vec<i32>,
    n_blocks: usize,
    steps: usize,
    /// One token's values, and its limbs where they are put into tiles from there.
    values: Vec<f32>,
    row: Vec<i8>,
}

impl Rows {
    /// Room for `tokens` of them.
    pub(crate) fn new(layout: &Layout, tokens: usize, precision: Precision, order: Order) -> Result<Self> {
        const WHAT: &str = "quantized activations";
        let (limbs, n_blocks) = (precision.limbs(), layout.blocks.len());
        let rows = dims::product(WHAT, tokens, limbs)?;
        let columns = match order {
            Order::Rows => dims::product(WHAT, tokens, layout.row)?,
            Order::Tiles => dims::product(WHAT, tokens.next_multiple_of(TILE), layout.steps * LINE)?,
        };
        let bytes: Vec<i8> = zeros(WHAT, dims::product(WHAT, limbs, columns)?.saturating_add(LINE))?;
        let words = if layout.is_streams() { words_of(limbs) } else { 0 };
        Ok(Self {
            order,
            limbs,
            stride: layout.row,
            begin: bytes.as_ptr().align_offset(LINE),
            bytes,
            words: zeros(WHAT, dims::product(WHAT, dims::product(WHAT, tokens, words)?, layout.row)?)?,
            scales: zeros(WHAT, dims::product(WHAT, tokens, n_blocks)?)?,
            minus_sums: zeros(WHAT, dims::product(WHAT, rows, n_blocks)?)?,
            n_blocks,
            steps: layout.steps,
            values: zeros(WHAT, layout.inputs)?,
            row: zeros(WHAT, if order == Order::Tiles { limbs * layout.row } else { 0 })?,
        })
    }

    /// Quantizes some tokens of `x`, no more than there is room for.
    pub(crate) fn fill(&mut self, layout: &Layout, x: Inputs<'_>, tokens: std::ops::Range<usize>, isa: Isa) {
        let (limbs, stride) = (self.limbs, self.stride);
        let scales = self.scales.chunks_exact_mut(self.n_blocks);
        let sums = self.minus_sums.chunks_exact_mut(self.n_blocks * limbs);
        for (i, (token, (scales, sums))) in tokens.zip(scales.zip(sums)).enumerate() {
            x.read(token, &mut self.values);
            if self.order == Order::Rows {
                let bytes = &mut self.bytes[self.begin + i * limbs * stride..][..limbs * stride];
                quantize(isa, layout, &self.values, limbs, bytes, scales, sums);
                if !self.words.is_empty() {
                    let words = words_of(limbs);
                    join(isa, bytes, limbs, &mut self.words[i * words * stride..][..words * stride]);
                }
            } else {
                quantize(isa, layout, &self.values, limbs, &mut self.row, scales, sums);
                to_tiles(layout, &self.row, limbs, i, &mut self.bytes[self.begin..]);
            }
        }
    }

    /// All bytes.
    pub(super) fn bytes(&self) -> &[i8] {
        &self.bytes[self.begin..]
    }

    /// Numbers of 16 bits of some tokens, for codes on a trellis.
    pub(super) fn words(&self) -> &[i16] {
        &self.words
    }

    /// Whether so many tokens can be read, whole tiles of them where they lie in tiles.
    pub(super) fn holds(&self, tokens: usize) -> bool {
        let bytes = match self.order {
            Order::Rows => tokens * self.stride,
            Order::Tiles => tokens.next_multiple_of(TILE) * self.steps * LINE,
        };
        self.bytes().len() >= bytes * self.limbs && self.scales.len() >= tokens * self.n_blocks
    }

    pub(super) fn scale(&self, token: usize, block: usize) -> f32 {
        self.scales[token * self.n_blocks + block]
    }

    pub(super) fn minus_sum(&self, token: usize, block: usize, limb: usize) -> i32 {
        self.minus_sums[(token * self.n_blocks + block) * self.limbs + limb]
    }
}

/// Numbers of 16 bits that an activation of so many limbs enters as.
pub(super) const fn words_of(limbs: usize) -> usize {
    limbs.div_ceil(2)
}

/// Limbs of such a number: the last one has two if there are two.
pub(super) fn limbs_of(limbs: usize, word: usize) -> std::ops::Range<usize> {
    match (limbs, word) {
        (2, _) => 0..2,
        (1, _) | (_, 0) => 0..1,
        _ => 1..3,
    }
}

per_isa! {
    /// A token's activations as numbers of 16 bits, from its limbs.
    fn join(bytes: &[i8], limbs: usize, to: &mut [i16]) = join_body;
}

#[inline(always)]
fn join_body(bytes: &[i8], limbs: usize, to: &mut [i16]) {
    let stride = bytes.len() / limbs;
    for (word, to) in to.chunks_exact_mut(stride).enumerate() {
        let range = limbs_of(limbs, word);
        let row = |limb: usize| &bytes[limb * stride..][..stride];
        let (low, high) = (row(range.start), row(range.end - 1));
        let times = if range.len() == 2 { 256 } else { 0 };
        for ((to, &low), &high) in to.iter_mut().zip(low).zip(high) {
            *to = i16::from(high) * times + i16::from(low);
        }
    }
}

/// Puts a token's rows into its line of every tile.
fn to_tiles(layout: &Layout, row: &[i8], limbs: usize, token: usize, tiles: &mut [i8]) {
    for block in &layout.blocks {
        for step in 0..block.steps(layout.grid.bits) {
            let taken = LINE.min(block.units * unit_inputs(layout.grid.bits) - step * LINE);
            for (limb, row) in row.chunks_exact(layout.row).enumerate() {
                let tile = (token / TILE * layout.steps + block.step + step) * limbs + limb;
                let to = &mut tiles[tile * TILE_BYTES + token % TILE * LINE..][..taken];
                to.copy_from_slice(&row[block.at + step * LINE..][..taken]);
            }
        }
    }
}

per_isa! {
    /// Quantizes a token: each block by its own scale.
    fn quantize(layout: &Layout, x: &[f32], limbs: usize, bytes: &mut [i8], scales: &mut [f32],
                minus_sums: &mut [i32]) = quantize_body;
}

#[inline(always)]
fn quantize_body(
    layout: &Layout,
    x: &[f32],
    limbs: usize,
    bytes: &mut [i8],
    scales: &mut [f32],
    minus_sums: &mut [i32],
) {
    let stride = bytes.len() / limbs;
    for (b, block) in layout.blocks.iter().enumerate() {
        let x = &x[block.first..][..block.len];
        let (scale, inverse) = scale_of(largest(x), limbs);
        scales[b] = scale;
        let sums = &mut minus_sums[b * limbs..][..limbs];
        match limbs {
            1 => split::<1>(x, inverse, &mut bytes[block.at..], stride, sums),
            2 => split::<2>(x, inverse, &mut bytes[block.at..], stride, sums),
            _ => split::<3>(x, inverse, &mut bytes[block.at..], stride, sums),
        }
    }
}

/// Bits of the largest magnitude; those of infinity and NaN are larger than all others.
#[inline(always)]
fn largest(x: &[f32]) -> u32 {
    let mut bits = 0;
    for &v in x {
        bits = bits.max(v.to_bits() & 0x7fff_ffff);
    }
    bits
}

/// The scale of a block and what activations are multiplied by; NaN and 0 where the block is not finite, so that the
/// results of the token become NaN.
#[inline(always)]
fn scale_of(largest: u32, limbs: usize) -> (f32, f32) {
    if largest >= f32::INFINITY.to_bits() {
        return (f32::NAN, 0.0);
    }
    if limbs == 1 {
        // Below this the inverse would overflow; such a block is zero.
        let largest = f32::from_bits(largest);
        return if largest < 1e-30 { (0.0, 0.0) } else { (largest / 127.0, 127.0 / largest) };
    }
    // largest < 2^(exponent - 126); codes stay within 2^top.
    let top = if limbs == 2 { 14 } else { 22 };
    let exponent = (largest >> 23).max(26) + 1;
    let step = exponent - top;
    (f32::from_bits(step << 23), f32::from_bits((254 - step) << 23))
}

/// Activations that are taken at once: their loops become vector instructions.
const CHUNK: usize = 64;

/// Added to a number of magnitude up to `2^22`, it leaves no room for a fraction. The sum is rounded half to even, and
/// its bits count up from those of the constant. A conversion would first test for numbers that are too large or NaN.
const WHOLE: f32 = 12_582_912.0;

/// Rounds to integers, half to even, and cuts them into signed bytes, lowest first.
#[inline(always)]
fn split<const L: usize>(x: &[f32], inverse: f32, bytes: &mut [i8], stride: usize, minus_sums: &mut [i32]) {
    let mut sums = [0; L];
    for (c, given) in x.chunks(CHUNK).enumerate() {
        let mut values = [0.0; CHUNK];
        values[..given.len()].copy_from_slice(given);
        let mut rest = [0_i32; CHUNK];
        for (rest, value) in rest.iter_mut().zip(&values) {
            *rest = (value * inverse + WHOLE).to_bits().wrapping_sub(WHOLE.to_bits()) as i32;
        }
        for (i, sum) in sums.iter_mut().enumerate() {
            let mut limbs = [0_i8; CHUNK];
            for (limb, rest) in limbs.iter_mut().zip(&mut rest) {
                *limb = *rest as i8;
                *rest = (*rest - i32::from(*limb)) >> 8;
                *sum -= i32::from(*limb);
            }
            bytes[i * stride + c * CHUNK..][..given.len()].copy_from_slice(&limbs[..given.len()]);
        }
    }
    minus_sums.copy_from_slice(&sums);
}
