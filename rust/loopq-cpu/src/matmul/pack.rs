//! Codes to the layout and back.

use rayon::prelude::*;

use super::layout::{unit_inputs, unit_lines, Layout, ScaleFormat, Streams, JOIN, LANES, LINE, PANEL};
use loopq_core::error::name_of;
use loopq_core::memory::zeros;
use loopq_core::{dims, Error, Execution, Result};

/// A quantized layer: biased codes (outputs, inputs), with scales and zero points (outputs, groups).
#[derive(Clone, Copy, Debug)]
pub struct Codes<'a> {
    /// Each below `2^bits`.
    pub codes: &'a [u8],
    /// Rounded to the layout's format.
    pub scales: &'a [f32],
    /// Of an asymmetric grid.
    pub zeros: Option<&'a [u8]>,
}

/// Packs a layer into `out`, which has [`Layout::n_bytes`] bytes.
pub fn pack(layout: &Layout, layer: Codes<'_>, out: &mut [u8], execution: &Execution<'_>) -> Result<()> {
    check(layout, layer)?;
    layout.check(out)?;
    if let Some(found) = layout.streams {
        execution.check()?;
        pack_streams(layout, found, layer, out);
        return Ok(());
    }
    execution.pool()?.install(|| {
        out.par_chunks_exact_mut(layout.panel).enumerate().try_for_each(|(p, panel)| {
            execution.check()?;
            pack_panel(layout, layer, p * PANEL, panel);
            Ok(())
        })
    })
}

fn check(layout: &Layout, layer: Codes<'_>) -> Result<()> {
    let grid = &layout.grid;
    dims::check_matrix("codes", layer.codes, layout.outputs, layout.inputs)?;
    dims::check_matrix("scales", layer.scales, layout.outputs, layout.n_groups())?;
    if layer.zeros.is_none() != grid.symmetric {
        let (expected, got) = if grid.symmetric { ("none", "some") } else { ("some", "none") };
        return Err(Error::shape("zero points", expected, got));
    }
    if let Some(zeros) = layer.zeros {
        dims::check_matrix("zero points", zeros, layout.outputs, layout.n_groups())?;
        loopq_core::pack::check_codes(zeros, layout.n_groups(), grid.bits, 0)?;
    }
    check_scales(layout.scales, layer.scales, layout.n_groups())?;
    loopq_core::pack::check_codes(layer.codes, layout.inputs, grid.bits, 0)
}

/// Refuses scales that are not finite, or would not be as they are stored.
fn check_scales(format: ScaleFormat, scales: &[f32], n_groups: usize) -> Result<()> {
    let Some(at) = scales.iter().position(|&scale| !format.rounded(scale).is_finite()) else {
        return Ok(());
    };
    let (row, group, value) = (at / n_groups, at % n_groups, f64::from(scales[at]));
    if value.is_finite() {
        return Err(Error::ScaleRange { row, group, value, dtype: format.name() });
    }
    Err(Error::NonFiniteMatrix { what: "scales", row, column: group, value: name_of(value) })
}

fn pack_panel(layout: &Layout, layer: Codes<'_>, first: usize, panel: &mut [u8]) {
    let (bits, n_groups) = (layout.grid.bits, layout.n_groups());
    let live = PANEL.min(layout.outputs - first);
    let (unit, lines) = (unit_inputs(bits), unit_lines(bits));
    panel.fill(0);
    for block in &layout.blocks {
        let mut scales = [0.0; PANEL];
        for lane in 0..live {
            scales[lane] = layer.scales[(first + lane) * n_groups + block.group];
        }
        layout.scales.write(&scales, &mut panel[block.scales..][..layout.zeros_after_scales()]);
        if let Some(zeros) = layer.zeros {
            for lane in 0..live {
                panel[block.scales + layout.zeros_after_scales() + lane] =
                    zeros[(first + lane) * n_groups + block.group];
            }
        }
        for lane in 0..live {
            let row = &layer.codes[(first + lane) * layout.inputs + block.first..][..block.len];
            for (u, codes) in row.chunks(unit).enumerate() {
                let strip = block.codes + (u * 2 + lane / LANES) * lines * LINE;
                pack_unit(bits, codes, &mut panel[strip..][..lines * LINE], lane % LANES * 4);
            }
        }
    }
}

/// Input `4 p + i` of a unit is plane `p` of byte `i` of an output's four. Of three bits, planes 0 to 5 are the low bits of
/// half bytes, two planes in a line. Planes 6 and 7 are the highest bits of these, each line with one bit.
fn pack_unit(bits: u32, codes: &[u8], lines: &mut [u8], byte: usize) {
    for (k, &code) in codes.iter().enumerate() {
        let (plane, at) = (k / 4, byte + k % 4);
        if bits == 3 && plane < 6 {
            lines[plane / 2 * LINE + at] |= code << (plane % 2 * 4);
        } else if bits == 3 {
            for line in 0..3 {
                lines[line * LINE + at] |= (code >> line & 1) << (plane % 2 * 4 + 3);
            }
        } else {
            lines[at] |= code << (bits as usize * plane);
        }
    }
}

/// The biased codes (outputs, inputs) of a packed weight.
pub fn unpack(layout: &Layout, packed: &[u8], execution: &Execution<'_>) -> Result<Vec<u8>> {
    layout.check(packed)?;
    if let Some(found) = layout.streams {
        execution.check()?;
        return unpack_streams(layout, found, packed);
    }
    let mut codes = zeros("codes", dims::product("codes", layout.outputs, layout.inputs)?)?;
    execution.pool()?.install(|| {
        codes.par_chunks_exact_mut(layout.inputs).enumerate().try_for_each(|(n, row)| {
            execution.check()?;
            unpack_row(layout, &packed[n / PANEL * layout.panel..][..layout.panel], n % PANEL, row);
            Ok(())
        })
    })?;
    Ok(codes)
}

/// The biased codes (rows, inputs) of some outputs of a weight on a plain grid.
pub fn rows(layout: &Layout, packed: &[u8], numbers: &[i64]) -> Result<Vec<u8>> {
    layout.check(packed)?;
    if layout.is_streams() {
        return Err(Error::setting("rows", "codes on a trellis", "codes of a plain grid"));
    }
    let mut codes = zeros("codes", dims::product("codes", numbers.len(), layout.inputs)?)?;
    for (row, &number) in codes.chunks_exact_mut(layout.inputs).zip(numbers) {
        let n = usize::try_from(number)
            .ok()
            .filter(|&n| n < layout.outputs)
            .ok_or_else(|| Error::shape("a row's number", format!("0 to {}", layout.outputs - 1), number))?;
        unpack_row(layout, &packed[n / PANEL * layout.panel..][..layout.panel], n % PANEL, row);
    }
    Ok(codes)
}

fn unpack_row(layout: &Layout, panel: &[u8], lane: usize, row: &mut [u8]) {
    let bits = layout.grid.bits;
    let (unit, lines) = (unit_inputs(bits), unit_lines(bits));
    for block in &layout.blocks {
        for (u, codes) in row[block.first..][..block.len].chunks_mut(unit).enumerate() {
            let strip = &panel[block.codes + (u * 2 + lane / LANES) * lines * LINE..][..lines * LINE];
            for (k, code) in codes.iter_mut().enumerate() {
                *code = code_in_unit(bits, strip, lane % LANES * 4, k);
            }
        }
    }
}

fn code_in_unit(bits: u32, lines: &[u8], byte: usize, k: usize) -> u8 {
    let (plane, at) = (k / 4, byte + k % 4);
    if bits == 3 && plane < 6 {
        return lines[plane / 2 * LINE + at] >> (plane % 2 * 4) & 7;
    }
    if bits == 3 {
        return (0..3).map(|line| (lines[line * LINE + at] >> (plane % 2 * 4 + 3) & 1) << line).sum();
    }
    lines[at] >> (bits as usize * plane) & (u8::MAX >> (8 - bits))
}

/// Packs a layer with codes on a trellis.
fn pack_streams(layout: &Layout, streams: Streams, layer: Codes<'_>, out: &mut [u8]) {
    let (bits, dim, n_groups) = (layout.grid.bits as usize, layout.inputs, layout.n_groups());
    out.fill(0);
    for s in layout.streams(streams) {
        let lines = layout.scales.lines() * LINE;
        for group in 0..n_groups {
            for panel in 0..s.padded() / PANEL {
                let mut scales = [0.0; PANEL];
                for (lane, scale) in scales.iter_mut().enumerate() {
                    let row = panel * PANEL + lane;
                    if row < s.rows {
                        *scale = layer.scales[(s.first + row) * n_groups + group];
                    }
                }
                let at = s.at + (group * (s.padded() / PANEL) + panel) * lines;
                layout.scales.write(&scales, &mut out[at..][..lines]);
            }
        }
        let records = &mut out[s.at + s.header..][..dim * s.record];
        for (j, record) in records.chunks_exact_mut(s.record).enumerate() {
            let mut put = |bit: usize, row: usize| {
                let code = u16::from(layer.codes[(s.first + row) * dim + j]) << (bit % 8);
                for (byte, part) in record[bit / 8..].iter_mut().zip(code.to_le_bytes()) {
                    *byte |= part;
                }
            };
            for row in 0..s.rows {
                put(s.bit(row, layout.grid.bits), row);
            }
            for before in 0..(8 * JOIN).div_ceil(bits) {
                put(s.padded() * bits + before * bits, s.rows - 1 - before % s.rows);
            }
        }
    }
}

/// The codes (outputs, inputs) of a packed weight on a trellis.
fn unpack_streams(layout: &Layout, streams: Streams, packed: &[u8]) -> Result<Vec<u8>> {
    let (bits, dim) = (layout.grid.bits, layout.inputs);
    let mut codes = zeros("codes", dims::product("codes", layout.outputs, dim)?)?;
    for s in layout.streams(streams) {
        let records = &packed[s.at + s.header..][..dim * s.record];
        for (j, record) in records.chunks_exact(s.record).enumerate() {
            for row in 0..s.rows {
                let bit = s.bit(row, bits);
                let pair = u16::from_le_bytes([record[bit / 8], record[bit / 8 + 1]]);
                codes[(s.first + row) * dim + j] = (pair >> (bit % 8)) as u8 & (u8::MAX >> (8 - bits));
            }
        }
    }
    Ok(codes)
}
