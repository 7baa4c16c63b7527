//! Where codes, scales and zero points of a layer lie. Spec: `docs/cpu.md`.

use half::{bf16, f16};

use crate::grid::check_bits;
use crate::memory::reserve;
use crate::trellis::Trellis;
use crate::{dims, Error, Result};

/// Outputs that a panel holds: two registers of 16 lanes.
pub const PANEL: usize = 32;
/// Bytes of a line, the unit in which everything is stored: a cache line, a 512-bit register.
pub(super) const LINE: usize = 64;
/// Outputs of a line.
pub(super) const LANES: usize = 16;
/// The most inputs that share a scale of the activations and an integer sum.
const MAX_BLOCK: usize = 256;
/// What longer groups are cut into.
const CUT: usize = 128;

/// Bytes of a record above its codes.
pub(super) const JOIN: usize = 2;
/// Bytes that are read from where sixteen rows begin.
pub(super) const READ: usize = 16;
/// How scales are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleFormat {
    /// float32.
    F32,
    /// bfloat16.
    Bf16,
    /// float16.
    F16,
}

impl ScaleFormat {
    /// The format with that name.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "float32" => Ok(Self::F32),
            "bfloat16" => Ok(Self::Bf16),
            "float16" => Ok(Self::F16),
            _ => Err(Error::setting("scale_dtype", format!("{name:?}"), "'float32', 'bfloat16', 'float16'")),
        }
    }

    /// Its name.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
        }
    }

    /// A scale as it is read again.
    pub(super) fn rounded(self, scale: f32) -> f32 {
        match self {
            Self::F32 => scale,
            Self::Bf16 => bf16::from_f32(scale).to_f32(),
            Self::F16 => f16::from_f32(scale).to_f32(),
        }
    }

    /// Bytes of a scale.
    pub(super) fn bytes(self) -> usize {
        if self == Self::F32 {
            4
        } else {
            2
        }
    }

    pub(super) fn lines(self) -> usize {
        if self == Self::F32 {
            2
        } else {
            1
        }
    }

    /// Writes a panel's scales, rounded to the format.
    pub(super) fn write(self, scales: &[f32; PANEL], to: &mut [u8]) {
        match self {
            Self::F32 => to.copy_from_slice(bytemuck::bytes_of(scales)),
            Self::Bf16 => {
                to.copy_from_slice(bytemuck::bytes_of(&scales.map(|s| bf16::from_f32(s).to_bits())));
            }
            Self::F16 => to.copy_from_slice(bytemuck::bytes_of(&scales.map(|s| f16::from_f32(s).to_bits()))),
        }
    }
}

/// What a layout is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Rows of the weight.
    pub outputs: usize,
    /// Columns of the weight.
    pub inputs: usize,
    /// Columns per scale; 0 for one scale per row.
    pub group_size: usize,
    /// 2, 3, 4 or 8.
    pub bits: u32,
    /// Whether there are no zero points: the code of zero is `2^(bits - 1)`.
    pub symmetric: bool,
    /// How scales are stored.
    pub scales: ScaleFormat,
}

/// Inputs that share a scale of the weight and one of the activations: a group, or a piece of a long one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    /// Its group.
    pub(super) group: usize,
    /// First input.
    pub(super) first: usize,
    /// Inputs.
    pub(super) len: usize,
    /// Where a row of quantized activations holds it.
    pub(super) at: usize,
    /// Offset in the panel of its group's scales.
    pub(super) scales: usize,
    /// Offset in the panel of its codes.
    pub(super) codes: usize,
    /// Units of codes.
    pub(super) units: usize,
    /// Tiles of 64 inputs before it, of those that begin with a block.
    pub(super) step: usize,
}

impl Block {
    /// Its tiles of 64 inputs.
    pub(super) fn steps(&self, bits: u32) -> usize {
        (self.units * unit_inputs(bits)).div_ceil(LINE)
    }
}

/// Where a layer's codes and scales lie.
///
/// A *panel* is 32 outputs; all panels have the same size and follow each other. A panel holds its groups one after
/// another: scales, zero points (one line, half of it used) if there are any, then the codes of the group's blocks.
/// A *unit* is the fewest inputs whose codes fill whole lines; a short last unit is filled up.
#[derive(Clone, Debug)]
pub struct Layout {
    pub(super) grid: Grid,
    pub(super) blocks: Vec<Block>,
    /// Bytes of a panel.
    pub(super) panel: usize,
    /// Bytes of a row of quantized activations.
    pub(super) row: usize,
    /// Tiles of 64 inputs, each block beginning a new one.
    pub(super) steps: usize,
    /// Of codes on a trellis, which do not lie in panels.
    pub(super) streams: Option<Streams>,
}

/// Lines of 16 outputs in a unit.
pub(super) const fn unit_lines(bits: u32) -> usize {
    if bits == 3 {
        3
    } else {
        1
    }
}

/// Inputs of a unit.
pub(super) const fn unit_inputs(bits: u32) -> usize {
    if bits == 3 {
        32
    } else {
        32 / bits as usize
    }
}

impl Layout {
    /// The layout of a layer.
    pub fn new(grid: Grid) -> Result<Self> {
        check_bits(grid.bits)?;
        if grid.outputs == 0 || grid.inputs == 0 {
            return Err(Error::shape(
                "a packed weight",
                "1 or more outputs and inputs",
                format!("{} x {}", grid.outputs, grid.inputs),
            ));
        }
        // A bound for all that follows: no code takes more than a byte, nor a scale and a zero point more than 8.
        dims::product("a packed weight", grid.outputs.saturating_add(PANEL), grid.inputs.saturating_mul(16))?;
        let (unit, unit_bytes) = (unit_inputs(grid.bits), unit_lines(grid.bits) * 2 * LINE);
        let group = if grid.group_size == 0 { grid.inputs } else { grid.group_size.min(grid.inputs) };
        let cut = if group > MAX_BLOCK { CUT } else { group };
        let header = (grid.scales.lines() + usize::from(!grid.symmetric)) * LINE;
        let (mut offset, mut at, mut step) = (0, 0, 0);
        let mut blocks = Vec::new();
        let n_blocks = grid.inputs / group * group.div_ceil(cut) + (grid.inputs % group).div_ceil(cut);
        reserve("the blocks of a layout", &mut blocks, n_blocks)?;
        for (index, start) in (0..grid.inputs).step_by(group).enumerate() {
            let scales = offset;
            offset += header;
            let end = grid.inputs.min(start + group);
            for first in (start..end).step_by(cut) {
                let len = cut.min(end - first);
                let units = len.div_ceil(unit);
                let block = Block { group: index, first, len, at, scales, codes: offset, units, step };
                step += block.steps(grid.bits);
                blocks.push(block);
                at += units * unit;
                offset += units * unit_bytes;
            }
        }
        Ok(Self { grid, blocks, panel: offset, row: row_bytes(at), steps: step, streams: None })
    }

    /// What it was made of.
    #[must_use]
    pub fn grid(&self) -> Grid {
        self.grid
    }

    /// Groups of a row.
    #[must_use]
    pub fn n_groups(&self) -> usize {
        self.blocks.last().map_or(0, |b| b.group + 1)
    }

    pub(crate) fn n_panels(&self) -> usize {
        self.grid.outputs.div_ceil(PANEL)
    }

    /// Bytes of the packed weight.
    #[must_use]
    pub fn n_bytes(&self) -> usize {
        self.streams.map_or(self.n_panels() * self.panel, |streams| self.stream_bytes(streams))
    }

    /// Whether its codes are on a trellis.
    pub(crate) fn is_streams(&self) -> bool {
        self.streams.is_some()
    }

    /// Whether quantized activations of the other layout are those of this one.
    pub(crate) fn has_rows_of(&self, other: &Self) -> bool {
        let row = |l: &Self| (l.grid.inputs, l.grid.group_size, l.grid.bits);
        row(self) == row(other)
    }

    /// Offset of zero points after the scales.
    pub(super) fn zeros_after_scales(&self) -> usize {
        self.grid.scales.lines() * LINE
    }

    pub(crate) fn check(&self, packed: &[u8]) -> Result<()> {
        match self.streams {
            Some(_) => dims::check_matrix("the packed weight", packed, 1, self.n_bytes()),
            None => dims::check_matrix("the packed weight", packed, self.n_panels(), self.panel),
        }
    }
}

/// How the rows of a layer are cut into streams.
#[derive(Clone, Copy, Debug)]
pub(super) struct Streams {
    pub(super) trellis: Trellis,
    /// Rows of each but the last.
    pub(super) rows: usize,
}

/// One run of rows.
#[derive(Clone, Copy)]
pub(super) struct Stream {
    pub(super) first: usize,
    pub(super) rows: usize,
    /// Where it begins.
    pub(super) at: usize,
    /// Bytes of a record.
    pub(super) record: usize,
    /// Bytes of its scales.
    pub(super) header: usize,
}

impl Stream {
    /// Rows with those that fill the last panel.
    pub(super) fn padded(&self) -> usize {
        self.rows.next_multiple_of(PANEL)
    }

    /// Bits of a row's code, from the lowest of a record.
    pub(super) fn bit(&self, row: usize, bits: u32) -> usize {
        (self.padded() - 1 - row) * bits as usize
    }
}

impl Layout {
    /// The layout of a layer whose codes are on a trellis, in streams of so many rows.
    pub fn on_trellis(grid: Grid, trellis: Trellis, stream_rows: usize) -> Result<Self> {
        if grid.bits != trellis.bits() || !grid.symmetric || stream_rows == 0 {
            let got =
                format!("{} bits, symmetric: {}, streams of {stream_rows} rows", grid.bits, grid.symmetric);
            let allowed = format!("{} bits, symmetric, streams of 1 row or more", trellis.bits());
            return Err(Error::setting("a grid of codes on a trellis", got, allowed));
        }
        let mut made = Self::new(grid)?;
        let streams = Streams { trellis, rows: stream_rows.min(grid.outputs) };
        // Short streams are filled up, so the bound of a plain layout is none of theirs.
        let one = made.stream(streams, 0);
        let bytes = dims::sum("a packed weight", one.header + READ, grid.inputs * one.record)?;
        dims::product("a packed weight", grid.outputs.div_ceil(streams.rows), bytes)?;
        made.streams = Some(streams);
        Ok(made)
    }

    pub(super) fn stream(&self, streams: Streams, number: usize) -> Stream {
        let of = |rows: usize| {
            let padded = rows.next_multiple_of(PANEL);
            let record = padded * self.grid.bits as usize / 8 + JOIN;
            let header = self.n_groups() * (padded / PANEL) * self.grid.scales.lines() * LINE;
            (record, header)
        };
        let (whole, header) = of(streams.rows);
        let at = number * (header + self.grid.inputs * whole);
        let first = number * streams.rows;
        let rows = streams.rows.min(self.grid.outputs - first);
        let (record, header) = of(rows);
        Stream { first, rows, at, record, header }
    }

    pub(super) fn streams(&self, streams: Streams) -> impl Iterator<Item = Stream> + '_ {
        (0..self.grid.outputs.div_ceil(streams.rows)).map(move |i| self.stream(streams, i))
    }

    /// Bytes of all streams, with those that are read behind the last record.
    fn stream_bytes(&self, streams: Streams) -> usize {
        let last = self.stream(streams, (self.grid.outputs - 1) / streams.rows);
        last.at + last.header + self.grid.inputs * last.record + READ
    }
}

/// A row of activations takes whole lines, and rows do not all start in the same set of the first-level cache.
fn row_bytes(len: usize) -> usize {
    let whole = len.next_multiple_of(LINE);
    if whole.is_multiple_of(8 * LINE) {
        whole + LINE
    } else {
        whole
    }
}
