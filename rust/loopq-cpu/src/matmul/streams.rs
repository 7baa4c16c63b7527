//! Products with codes on a trellis: every weight is decoded where it is multiplied. Format: `docs/formats/trellis.md`.
//!
//! A value is the sum of the four bytes that a state is mixed into, less 510. That fits 16 bits, so an input enters as
//! numbers of 16 bits, each made of two limbs. One instruction multiplies two such numbers by the values of sixteen
//! rows. A block has at most 256 inputs, so its sums fit 32 bits: `256 * 510 * 2^14 < 2^31`. They stay integers. Two
//! limbs' sums are below `2^24` and would be joined with one rounding, which is that of the number's own sum. So the
//! rest is the same as in the other products: blocks, order of operations and bits.
//!
//! Streams follow each other. A stream first holds its scales, group by group in lines of 32 rows. Then it has a record
//! for each input. A record holds the codes of its rows, with the last row's in the lowest bits. The 16 bits that
//! precede the first row's code lie above it, since the ends of a stream are joined. A row's state is a window of the
//! record that begins at the row's code.
//!
//! A panel reads 12 bytes of a record at 3 bits, and the next record lies 194 bytes further. So a few records are
//! multiplied by all panels before the next ones, while they are in the first-level cache.
#![allow(unsafe_code)] // pointers into slices whose lengths have been compared with the layout

use std::array::from_fn;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::activations::{limbs_of, words_of, Rows};
use super::layout::{Block, Layout, Stream, Streams, JOIN, LANES, LINE, MAX_BLOCK, PANEL, READ};
use super::tile::{value_of, Lanes};
use super::windows::Windows;
use super::{add_bias, Results, Weight, FEW};

/// Panels with sums in memory at once.
const PANELS: usize = 16;
/// Records that all panels are multiplied by before the next ones; even.
const RECORDS: usize = 32;
/// Offset of the byte sum from the value's numerator, and the value's denominator.
const LESS: i32 = 510;
const PARTS: f32 = 128.0;

/// [`Weight::run`] of codes on a trellis.
pub(super) fn run(
    weight: &Weight<'_>,
    streams: Streams,
    rows: &Rows,
    count: usize,
    panels: Range<usize>,
    mut write: impl FnMut(usize, usize, &[f32]),
) {
    let Weight { layout, packed, bias, engine } = *weight;
    let (windows, in_stream) = (Windows::new(streams.trellis), streams.panels());
    let mut results = Results([0.0; _]);
    let most = PANELS.min(results.0.len() / PANEL / FEW.min(count));
    let mut begin = panels.start;
    while begin < panels.end {
        let stream = layout.stream(streams, begin / in_stream);
        let within = begin % in_stream;
        let n = most.min(in_stream - within).min(panels.end - begin);
        for first in (0..count).step_by(FEW) {
            let tokens = first..count.min(first + FEW);
            let few = tokens.len();
            let out = &mut results.0[..n * few * PANEL];
            out.fill(0.0);
            let bytes = &packed[stream.at..];
            let part =
                Part { layout, windows: &windows, bytes, stream, panels: within..within + n, rows, tokens };
            engine.run_streams(&part, out);
            for (i, values) in out.chunks_exact_mut(PANEL).enumerate() {
                let row = (within + i / few) * PANEL;
                let values = &mut values[..PANEL.min(stream.rows - row)];
                add_bias(values, bias, stream.first + row);
                write(first + i % few, stream.first + row, values);
            }
        }
        begin += n;
    }
}

/// Some panels of a stream and the tokens that they multiply.
pub(super) struct Part<'a> {
    layout: &'a Layout,
    windows: &'a Windows,
    /// The stream and what follows it.
    bytes: &'a [u8],
    stream: Stream,
    panels: Range<usize>,
    rows: &'a Rows,
    tokens: Range<usize>,
}

impl Part<'_> {
    /// Numbers of 16 bits that an activation enters as.
    pub(super) fn words(&self) -> usize {
        words_of(self.rows.limbs)
    }

    /// Bits of a code.
    pub(super) fn bits(&self) -> u32 {
        self.layout.grid.bits
    }

    fn check(&self, out: &[f32]) {
        let (layout, rows, s) = (self.layout, self.rows, &self.stream);
        assert!(self.bytes.len() >= s.header + layout.inputs * s.record + READ);
        assert!(self.panels.end * PANEL <= s.padded() && self.panels.len() <= PANELS);
        assert!(s.header == layout.n_groups() * (s.padded() / PANEL) * layout.scales.lines() * LINE);
        assert!(s.record == s.padded() * layout.grid.bits as usize / 8 + JOIN);
        assert!(rows.stride == layout.row && rows.holds(self.tokens.end));
        assert!(rows.words().len() >= self.tokens.end * self.words() * rows.stride);
        assert!(out.len() == self.panels.len() * self.tokens.len() * PANEL);
    }

    /// Where a panel's codes of the first input of a block begin: those of its last sixteen rows.
    ///
    /// # Safety
    /// After `check`, with a panel and a block of this part.
    unsafe fn codes(&self, panel: usize, block: &Block) -> *const u8 {
        let rows = (self.stream.padded() - (panel + 1) * PANEL) * self.layout.grid.bits as usize / 8;
        // SAFETY: a record of the stream.
        unsafe { self.bytes.as_ptr().add(self.stream.header + block.first * self.stream.record + rows) }
    }

    /// A token's activations from a place in a row on, of each word.
    ///
    /// # Safety
    /// After `check`, with a token of this part and a place in a row.
    unsafe fn activations<const W: usize>(&self, token: usize, at: usize) -> [*const i16; W] {
        let stride = self.rows.stride;
        // SAFETY: `check` has compared the length of all rows with the tokens.
        unsafe { from_fn(|word| self.rows.words().as_ptr().add((token * W + word) * stride + at)) }
    }

    /// The offset of all values, times the sum of the activations.
    ///
    /// # Safety
    /// As [`streams`].
    #[inline(always)]
    unsafe fn start<V: Lanes, const W: usize>(&self, token: usize, block: usize) -> Sums<V::Ints, W> {
        // SAFETY: the caller's.
        let mut sums = [[unsafe { V::splat(0) }; 2]; W];
        for (word, sum) in sums.iter_mut().enumerate() {
            let limbs = limbs_of(self.rows.limbs, word).rev();
            let minus = limbs.fold(0, |sum, i| 256 * sum + self.rows.minus_sum(token, block, i));
            // Wraps where the sum of the block does not. SAFETY: the caller's.
            *sum = unsafe { [V::splat(minus.wrapping_mul(LESS)); 2] };
        }
        sums
    }

    /// Adds the sums of a block to the results of a panel and token.
    ///
    /// # Safety
    /// As [`streams`], with room for 32 results at `to`.
    #[inline(always)]
    unsafe fn finish<V: Lanes, const BITS: u32, const W: usize>(
        &self,
        panel: usize,
        token: usize,
        b: usize,
        sums: Sums<V::Ints, W>,
        to: *mut f32,
    ) {
        let (layout, group) = (self.layout, self.layout.blocks[b].group);
        let scales = (group * (self.stream.padded() / PANEL) + panel) * layout.scales.lines() * LINE;
        // SAFETY: the layout's offset of a panel's scales; the rest is the caller's.
        unsafe {
            let mut sums = sums;
            for sum in &mut sums {
                *sum = V::in_order::<BITS>(*sum);
            }
            let step = V::splat_float(self.rows.scale(token, b) / PARTS);
            for half in 0..2 {
                let at = self.bytes.as_ptr().add(scales + half * LANES * layout.scales.bytes());
                let scale = V::mul(V::scales(at, layout.scales), step);
                let mut digits = [sums[0][half]; W];
                for word in 1..W {
                    digits[word] = sums[word][half];
                }
                let value = value_of::<V, W>(digits);
                let to = to.add(half * LANES);
                V::store(to, V::fma(value, scale, V::load(to)));
            }
        }
    }
}

/// Integer sums of a panel and token: `[word][half]`, rows in the order of the instruction set.
type Sums<I, const W: usize> = [[I; 2]; W];

/// Multiplies a part, `T` tokens at a time. Adds to `out` (panels, tokens, 32).
///
/// # Safety
/// The instruction set of `V` must exist.
#[inline(always)]
pub(super) unsafe fn streams<V: Lanes, const BITS: u32, const W: usize, const T: usize>(
    p: &Part<'_>,
    out: &mut [f32],
) {
    p.check(out);
    assert!(p.words() == W && p.bits() == BITS);
    // SAFETY: the caller's; `check` has compared all lengths.
    unsafe {
        if p.tokens.len() == 1 {
            one::<V, BITS, W>(p, out);
        } else {
            several::<V, BITS, W, T>(p, out);
        }
    }
}

/// One token: values are multiplied in the registers that they are computed in.
///
/// # Safety
/// As [`streams`], after `check`.
#[inline(always)]
unsafe fn one<V: Lanes, const BITS: u32, const W: usize>(p: &Part<'_>, out: &mut [f32]) {
    let (token, record) = (p.tokens.start, p.stream.record);
    let mut kept = [MaybeUninit::<Sums<V::Ints, W>>::uninit(); PANELS];
    for (b, block) in p.layout.blocks.iter().enumerate() {
        for first in (0..block.len).step_by(RECORDS) {
            let n = RECORDS.min(block.len - first);
            for (i, panel) in p.panels.clone().enumerate() {
                // SAFETY: records of the block, and sums that were kept of its records before. Behind an odd number of
                // activations lies a zero, which may meet any value.
                unsafe {
                    let mut sums = if first == 0 { p.start::<V, W>(token, b) } else { kept[i].assume_init() };
                    let mut at = p.codes(panel, block).add(first * record);
                    let mut x = p.activations::<W>(token, block.at + first);
                    for k in (0..n).step_by(2) {
                        let next = if k + 1 < n { at.add(record) } else { at };
                        // No hardware foresees all jumps from record to record.
                        V::prefetch(at.wrapping_add(RECORDS * record));
                        V::prefetch(at.wrapping_add((RECORDS + 1) * record));
                        V::add_pair::<BITS, W>(&mut sums, at, next, p.windows, x);
                        at = at.wrapping_add(2 * record);
                        for x in &mut x {
                            *x = x.wrapping_add(2);
                        }
                    }
                    if first + n < block.len {
                        kept[i].write(sums);
                    } else {
                        p.finish::<V, BITS, W>(panel, token, b, sums, out[i * PANEL..].as_mut_ptr());
                    }
                }
            }
        }
    }
}

/// Several tokens: the values of a block are computed once and kept in the first-level cache.
///
/// # Safety
/// As [`streams`], after `check`.
#[inline(always)]
unsafe fn several<V: Lanes, const BITS: u32, const W: usize, const T: usize>(p: &Part<'_>, out: &mut [f32]) {
    let (count, record) = (p.tokens.len(), p.stream.record);
    let mut values = [MaybeUninit::<[V::Codes; 2]>::uninit(); MAX_BLOCK / 2];
    for (b, block) in p.layout.blocks.iter().enumerate() {
        let pairs = &mut values[..block.len.div_ceil(2)];
        for (i, panel) in p.panels.clone().enumerate() {
            // SAFETY: records of the block; all pairs are written before they are read. Behind an odd number of
            // activations lies a zero, which may meet any value.
            unsafe {
                let at = p.codes(panel, block);
                for (k, pair) in pairs.iter_mut().enumerate() {
                    let next = (2 * k + 1).min(block.len - 1) * record;
                    pair.write(V::pair::<BITS>(at.add(2 * k * record), at.add(next), p.windows));
                }
                let pairs = pairs.as_ptr().cast::<[V::Codes; 2]>();
                let to = out[i * count * PANEL..][..count * PANEL].as_mut_ptr();
                let mut token = 0;
                while token < count {
                    let to = to.add(token * PANEL);
                    if count - token >= T {
                        tile::<V, BITS, W, T>(p, panel, p.tokens.start + token, b, pairs, to);
                        token += T;
                    } else {
                        tile::<V, BITS, W, 1>(p, panel, p.tokens.start + token, b, pairs, to);
                        token += 1;
                    }
                }
            }
        }
    }
}

/// Adds the products of `T` tokens and a block's values.
///
/// # Safety
/// As [`streams`], with all values of block `b` at `pairs` and room for `T` tokens at `to`.
#[inline(always)]
unsafe fn tile<V: Lanes, const BITS: u32, const W: usize, const T: usize>(
    p: &Part<'_>,
    panel: usize,
    token: usize,
    b: usize,
    pairs: *const [V::Codes; 2],
    to: *mut f32,
) {
    let block = &p.layout.blocks[b];
    // SAFETY: the caller's; rows of activations go on behind an odd block.
    unsafe {
        let mut sums = [p.start::<V, W>(token, b); T];
        let mut x = [p.activations::<W>(token, block.at); T];
        for t in 1..T {
            sums[t] = p.start::<V, W>(token + t, b);
            x[t] = p.activations::<W>(token + t, block.at);
        }
        for k in 0..block.len.div_ceil(2) {
            let pair = &*pairs.add(k);
            for t in 0..T {
                for word in 0..W {
                    for half in 0..2 {
                        let sum = sums[t][word][half];
                        sums[t][word][half] = V::dot_pair(sum, pair[half], x[t][word].add(2 * k));
                    }
                }
            }
        }
        for t in 0..T {
            p.finish::<V, BITS, W>(panel, token + t, b, sums[t], to.add(t * PANEL));
        }
    }
}
