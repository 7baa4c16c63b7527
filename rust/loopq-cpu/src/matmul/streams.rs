//! Products with codes on a trellis: every weight is decoded where it is multiplied. Format: `docs/formats/trellis.md`.
//!
//! A value is the sum of the four bytes that a state is mixed into, less 510. That fits 16 bits, so an input enters as
//! numbers of 16 bits, each made of two limbs. One instruction multiplies such a number by the values of sixteen rows. A
//! block has at most 256 inputs, so its sums fit 32 bits: `256 * 510 * 2^14 < 2^31`. They stay integers. Two limbs' sums
//! are below `2^24` and would be joined with one rounding, which is that of the number's own sum. So the rest is the
//! same as in the other products: blocks, order of operations and bits.
//!
//! Streams follow each other. A stream first holds its scales, group by group in lines of 32 rows. Then it has a record
//! for each input. A record holds the codes of its rows, with the last row's in the lowest bits. The 16 bits that
//! precede the first row's code lie above it, since the ends of a stream are joined. A row's state is a window of the
//! record that begins at the row's code.
#![allow(unsafe_code)] // pointers into slices whose lengths have been compared with the layout

use std::ops::Range;

use super::activations::Order;
use super::activations::Rows;
use super::layout::{Layout, Streams, JOIN, LANES, LINE, PANEL, READ};
use super::tile::{value_of, Lanes};
use super::windows::Windows;
use super::{share, Columns, Inputs, Plan};
use loopq_core::memory::zeros;
use loopq_core::simd::Isa;
use loopq_core::Result;

/// Tokens quantized at once.
const TOKENS: usize = 8;
/// Panels with results in memory at once.
const PANELS: usize = 16;
/// Inputs whose products are added to sums of their own, so that none waits for the one before.
const TURNS: usize = 2;
/// Offset of the byte sum from the value's numerator, and the value's denominator.
const LESS: i32 = 510;
const PARTS: f32 = 128.0;

/// `out = x W^T + bias` for a weight and shapes that have been checked.
pub(super) fn multiply(
    layout: &Layout,
    streams: Streams,
    packed: &[u8],
    x: Inputs<'_>,
    bias: Option<&[f32]>,
    columns: &Columns<'_>,
    plan: &Plan<'_>,
) -> Result<()> {
    let tokens = x.tokens(layout.inputs)?;
    let chunk = tokens.min(TOKENS);
    let mut rows = Rows::new(layout, chunk, plan.precision, Order::Rows)?;
    let words = words_of(rows.limbs);
    let mut spread: Vec<[i16; 2]> = zeros("repeated activations", chunk * words * rows.stride)?;
    let (isa, windows) = (Isa::best(), Windows::new(streams.trellis));
    let in_stream = streams.rows.div_ceil(PANEL);
    let n_streams = layout.outputs.div_ceil(streams.rows);
    let last = layout.stream(streams, n_streams - 1).padded() / PANEL;
    for first in (0..tokens).step_by(TOKENS) {
        plan.execution.check()?;
        let count = TOKENS.min(tokens - first);
        rows.fill(layout, x, first..first + count, isa);
        join(&rows, &mut spread[..count * words * rows.stride]);
        share((n_streams - 1) * in_stream + last, &plan.execution, |panels| {
            let mut results = [0.0; PANELS * TOKENS * PANEL];
            let mut begin = panels.start;
            while begin < panels.end {
                let s = layout.stream(streams, begin / in_stream);
                let within = begin % in_stream;
                let n = PANELS.min(in_stream - within).min(panels.end - begin);
                let out = &mut results[..n * count * PANEL];
                out.fill(0.0);
                let part = Part {
                    layout,
                    windows: &windows,
                    bytes: &packed[s.at..],
                    record: s.record,
                    header: s.header,
                    padded: s.padded(),
                    panels: within..within + n,
                    rows: &rows,
                    spread: &spread,
                    count,
                };
                plan.engine.run_streams(&part, out);
                for (i, values) in out.chunks_exact_mut(PANEL).enumerate() {
                    let row = (within + i / count) * PANEL;
                    let live = PANEL.min(s.rows - row);
                    let (column, values) = (s.first + row, &mut values[..live]);
                    if let Some(bias) = bias {
                        values.iter_mut().zip(&bias[column..]).for_each(|(v, b)| *v += b);
                    }
                    // SAFETY: `share` gives each thread different panels, and these columns belong to one of them.
                    unsafe { columns.write(first + i % count, column, values) };
                }
                begin += n;
            }
        })?;
    }
    Ok(())
}

/// Numbers of 16 bits that an activation of so many limbs enters as.
const fn words_of(limbs: usize) -> usize {
    limbs.div_ceil(2)
}

/// Limbs of such a number: the last one has two if there are two.
fn limbs_of(limbs: usize, word: usize) -> std::ops::Range<usize> {
    match (limbs, word) {
        (2, _) => 0..2,
        (1, _) | (_, 0) => 0..1,
        _ => 1..3,
    }
}

/// Activations as numbers of 16 bits, row `token * words + word`, each twice.
fn join(rows: &Rows, to: &mut [[i16; 2]]) {
    let words = words_of(rows.limbs);
    for (i, to) in to.chunks_exact_mut(rows.stride).enumerate() {
        let (token, limbs) = (i / words, limbs_of(rows.limbs, i % words));
        let row = |limb: usize| &rows.bytes()[(token * rows.limbs + limb) * rows.stride..][..rows.stride];
        let (low, high) = (row(limbs.start), row(limbs.end - 1));
        let times = if limbs.len() == 2 { 256 } else { 0 };
        for ((to, &low), &high) in to.iter_mut().zip(low).zip(high) {
            *to = [i16::from(high) * times + i16::from(low); 2];
        }
    }
}

/// Some panels of a stream and the tokens that they multiply.
pub(super) struct Part<'a> {
    layout: &'a Layout,
    windows: &'a Windows,
    /// The stream and what follows it.
    bytes: &'a [u8],
    record: usize,
    header: usize,
    padded: usize,
    panels: Range<usize>,
    rows: &'a Rows,
    /// The numbers of [`join`].
    spread: &'a [[i16; 2]],
    count: usize,
}

impl Part<'_> {
    /// Numbers of 16 bits that an activation enters as.
    pub(super) fn words(&self) -> usize {
        words_of(self.rows.limbs)
    }

    fn check(&self, out: &[f32]) {
        let (inputs, rows) = (self.layout.inputs, self.rows);
        assert!(self.bytes.len() >= self.header + inputs * self.record + READ);
        assert!(self.panels.end * PANEL <= self.padded);
        let scales = self.layout.scales.lines() * LINE;
        assert!(self.header == self.layout.n_groups() * (self.padded / PANEL) * scales);
        assert!(self.record == self.padded * self.layout.grid.bits as usize / 8 + JOIN);
        assert!(rows.stride == self.layout.row && rows.holds(self.count));
        assert!(self.spread.len() >= self.count * words_of(rows.limbs) * rows.stride);
        assert!(out.len() == self.panels.len() * self.count * PANEL);
    }
}

/// Multiplies by all tokens, `T` at a time and then one at a time. Adds to `out` (panels, tokens, 32).
///
/// # Safety
/// The instruction set of `V` must exist.
#[inline(always)]
pub(super) unsafe fn streams<V: Lanes, const W: usize, const T: usize>(p: &Part<'_>, out: &mut [f32]) {
    p.check(out);
    assert!(words_of(p.rows.limbs) == W);
    let mut token = 0;
    while token < p.count {
        // SAFETY: the caller's; `check` has compared all lengths, and there are as many tokens left.
        unsafe {
            if T > 1 && p.count - token >= T {
                tokens::<V, W, T, 1>(p, token, out);
                token += T;
            } else {
                tokens::<V, W, 1, TURNS>(p, token, out);
                token += 1;
            }
        }
    }
}

/// Integer sums: `[turn][token][word][half of the panel]`.
type Sums<I, const W: usize, const T: usize, const S: usize> = [[[[I; 2]; W]; T]; S];

/// # Safety
/// As [`streams`], with `T` tokens from `token` on and `S` sums for each output, token and word.
#[inline(always)]
unsafe fn tokens<V: Lanes, const W: usize, const T: usize, const S: usize>(
    p: &Part<'_>,
    token: usize,
    out: &mut [f32],
) {
    let (layout, bits) = (p.layout, p.layout.grid.bits as usize);
    let lines = layout.scales.lines() * LINE;
    let n_panels = p.padded / PANEL;
    for (b, block) in layout.blocks.iter().enumerate() {
        for panel in p.panels.clone() {
            // The codes of the panel's last sixteen rows; those of its first follow.
            let rows = (p.padded - (panel + 1) * PANEL) * bits / 8;
            // SAFETY: offsets of the layout; `check` has compared the lengths of the slices with it. A record's sixteen
            // rows and the bytes behind them lie within the record, the next one or the bytes kept behind the last.
            unsafe {
                let at = p.bytes.as_ptr().add(p.header + block.first * p.record + rows);
                let mut sums = start::<V, W, T, S>(p, token, b);
                let x = p.spread.as_ptr().add(token * W * p.rows.stride + block.at);
                let whole = block.len - block.len % S;
                for k in (0..whole).step_by(S) {
                    for s in 0..S {
                        add::<V, W, T>(p, at.add((k + s) * p.record), x.add(k + s), block.len, &mut sums[s]);
                    }
                }
                for k in whole..block.len {
                    add::<V, W, T>(p, at.add(k * p.record), x.add(k), block.len, &mut sums[0]);
                }
                let scales = p.bytes.as_ptr().add((block.group * n_panels + panel) * lines);
                for t in 0..T {
                    let step = V::splat_float(p.rows.scale(token + t, b) / PARTS);
                    let place = ((panel - p.panels.start) * p.count + token + t) * PANEL;
                    for half in 0..2 {
                        let weight =
                            V::scales(scales.add(half * LANES * layout.scales.bytes()), layout.scales);
                        let mut digits = [V::splat(0); W];
                        for (word, digit) in digits.iter_mut().enumerate() {
                            *digit = sums[0][t][word][half];
                            for more in &sums[1..] {
                                *digit = V::add(*digit, more[t][word][half]);
                            }
                        }
                        let to = out.as_mut_ptr().add(place + half * LANES);
                        V::store(to, V::fma(value_of::<V, W>(digits), V::mul(weight, step), V::load(to)));
                    }
                }
            }
        }
    }
}

/// The offset of all values: times the sum of the activations.
///
/// # Safety
/// As [`tokens`].
#[inline(always)]
unsafe fn start<V: Lanes, const W: usize, const T: usize, const S: usize>(
    p: &Part<'_>,
    token: usize,
    b: usize,
) -> Sums<V::Ints, W, T, S> {
    // SAFETY: the caller's.
    unsafe {
        let mut sums = [[[[V::splat(0); 2]; W]; T]; S];
        for (t, sums) in sums[0].iter_mut().enumerate() {
            for (word, pair) in sums.iter_mut().enumerate() {
                let limbs = limbs_of(p.rows.limbs, word).rev();
                let minus = limbs.fold(0, |sum, i| 256 * sum + p.rows.minus_sum(token + t, b, i));
                // Wraps where the sum of the block does not.
                *pair = [V::splat(minus.wrapping_mul(LESS)); 2];
            }
        }
        sums
    }
}

/// Adds the products of one input, whose record is at `at`.
///
/// # Safety
/// As [`tokens`].
#[inline(always)]
unsafe fn add<V: Lanes, const W: usize, const T: usize>(
    p: &Part<'_>,
    at: *const u8,
    x: *const [i16; 2],
    inputs: usize,
    sums: &mut [[[V::Ints; 2]; W]; T],
) {
    let bits = p.layout.grid.bits as usize;
    // SAFETY: the caller's; prefetching may look past the end.
    unsafe {
        // Prefetches the same rows in the next block: no hardware foresees a jump from record to record.
        // Without it, 4 bits took 3.5 times as long where the second-level cache did not hold the records.
        V::prefetch(at.wrapping_add(inputs * p.record));
        let values = [V::mixed(at.add(2 * bits), p.windows), V::mixed(at, p.windows)];
        let values = [V::byte_sums(values[0]), V::byte_sums(values[1])];
        for (t, sums) in sums.iter_mut().enumerate() {
            for (word, pair) in sums.iter_mut().enumerate() {
                let x = x.add((t * W + word) * p.rows.stride);
                *pair = [V::dot_sums(pair[0], values[0], x), V::dot_sums(pair[1], values[1], x)];
            }
        }
    }
}
