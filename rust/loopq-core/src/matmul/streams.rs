//! Products with codes on a trellis: every weight is decoded where it is multiplied. Format: `docs/formats/trellis.md`.
//!
//! A value is the sum of the four bytes that a state is mixed into, less 510. So the instruction that multiplies four
//! codes of an output by four inputs takes the four bytes of one weight and four times the same input. The sums stay
//! integers, and the rest is the same as in the other products: blocks, limbs and order of operations.
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
use crate::memory::zeros;
use crate::simd::Isa;
use crate::Result;

/// Tokens quantized at once.
const TOKENS: usize = 8;
/// Panels with results in memory at once.
const PANELS: usize = 16;
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
    let mut spread: Vec<[i8; 4]> = zeros("repeated activations", chunk * rows.limbs * rows.stride)?;
    let (isa, windows) = (Isa::best(), Windows::new(streams.trellis));
    let in_stream = streams.rows.div_ceil(PANEL);
    let n_streams = layout.outputs.div_ceil(streams.rows);
    let last = layout.stream(streams, n_streams - 1).padded() / PANEL;
    for first in (0..tokens).step_by(TOKENS) {
        plan.execution.check()?;
        let count = TOKENS.min(tokens - first);
        rows.fill(layout, x, first..first + count, isa);
        for (to, &limb) in spread.iter_mut().zip(rows.bytes()) {
            *to = [limb; 4];
        }
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
    /// Each byte of `rows` four times.
    spread: &'a [[i8; 4]],
    count: usize,
}

impl Part<'_> {
    /// Limbs of an activation.
    pub(super) fn limbs(&self) -> usize {
        self.rows.limbs
    }

    fn check(&self, out: &[f32]) {
        let (inputs, rows) = (self.layout.inputs, self.rows);
        assert!(self.bytes.len() >= self.header + inputs * self.record + READ);
        assert!(self.panels.end * PANEL <= self.padded);
        let scales = self.layout.scales.lines() * LINE;
        assert!(self.header == self.layout.n_groups() * (self.padded / PANEL) * scales);
        assert!(self.record == self.padded * self.layout.grid.bits as usize / 8 + JOIN);
        assert!(rows.stride == self.layout.row && rows.holds(self.count));
        assert!(self.spread.len() >= self.count * rows.limbs * rows.stride);
        assert!(out.len() == self.panels.len() * self.count * PANEL);
    }
}

/// Multiplies by all tokens, `T` at a time and then one at a time. Adds to `out` (panels, tokens, 32).
///
/// # Safety
/// The instruction set of `V` must exist.
#[inline(always)]
pub(super) unsafe fn streams<V: Lanes, const L: usize, const T: usize>(p: &Part<'_>, out: &mut [f32]) {
    p.check(out);
    assert!(p.rows.limbs == L);
    let mut token = 0;
    while token < p.count {
        // SAFETY: the caller's; `check` has compared all lengths, and there are as many tokens left.
        unsafe {
            if T > 1 && p.count - token >= T {
                tokens::<V, L, T>(p, token, out);
                token += T;
            } else {
                tokens::<V, L, 1>(p, token, out);
                token += 1;
            }
        }
    }
}

/// # Safety
/// As [`streams`], with `T` tokens from `token` on.
#[inline(always)]
unsafe fn tokens<V: Lanes, const L: usize, const T: usize>(p: &Part<'_>, token: usize, out: &mut [f32]) {
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
                let mut at = p.bytes.as_ptr().add(p.header + block.first * p.record + rows);
                let mut sums = [[[V::splat(0); 2]; L]; T];
                for (t, sums) in sums.iter_mut().enumerate() {
                    for (limb, pair) in sums.iter_mut().enumerate() {
                        *pair = [V::splat(LESS * p.rows.minus_sum(token + t, b, limb)); 2];
                    }
                }
                let x = p.spread.as_ptr().add(token * L * p.rows.stride + block.at);
                for k in 0..block.len {
                    // Prefetches the same rows in the next block: no hardware foresees a jump from record to record.
                    // Without it, 4 bits took 3.5 times as long where the second-level cache did not hold the records.
                    V::prefetch(at.wrapping_add(block.len * p.record));
                    let codes = [V::mixed(at.add(2 * bits), p.windows), V::mixed(at, p.windows)];
                    for (t, sums) in sums.iter_mut().enumerate() {
                        for (limb, pair) in sums.iter_mut().enumerate() {
                            let x = x.add((t * L + limb) * p.rows.stride + k).cast::<i8>();
                            *pair =
                                [V::dot::<true>(pair[0], codes[0], x), V::dot::<true>(pair[1], codes[1], x)];
                        }
                    }
                    at = at.add(p.record);
                }
                let scales = p.bytes.as_ptr().add((block.group * n_panels + panel) * lines);
                for (t, sums) in sums.iter().enumerate() {
                    let step = V::splat_float(p.rows.scale(token + t, b) / PARTS);
                    let place = ((panel - p.panels.start) * p.count + token + t) * PANEL;
                    for half in 0..2 {
                        let weight =
                            V::scales(scales.add(half * LANES * layout.scales.bytes()), layout.scales);
                        let mut digits = [V::splat(0); L];
                        for (digit, pair) in digits.iter_mut().zip(sums) {
                            *digit = pair[half];
                        }
                        let to = out.as_mut_ptr().add(place + half * LANES);
                        V::store(to, V::fma(value_of::<V, L>(digits), V::mul(weight, step), V::load(to)));
                    }
                }
            }
        }
    }
}
