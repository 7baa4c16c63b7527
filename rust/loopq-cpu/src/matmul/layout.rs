//! Where codes, scales and zero points of a layer lie.
//!
//! A line is 64 bytes: four bytes for each of 16 outputs. A panel is 32 outputs, and all panels have the same size. A
//! panel holds its groups in order. A group has its 32 scales first: two lines for float32, one for bfloat16 and
//! float16. Then it has a line with its 32 zero points, if any, and then its codes in units.
//!
//! A unit is the smallest number of inputs that fills whole lines. It stores its lower 16 outputs before its upper 16.
//! Zero codes and zero scales fill short units and missing outputs. Input `4 p + i` of a unit is in byte `i` of an
//! output's four bytes:
//!
//! ```text
//! bits  inputs of a unit  lines for 16 outputs  where in the byte
//! 8     4                 1                     the byte
//! 4     8                 1                     bits 4 p ..
//! 2     16                1                     bits 2 p ..
//! 3     32                3                     p up to 5: bits 4 (p mod 2) .. of line p div 2
//!                                               p of 6 and 7: bits 3 and 7 of all three lines, the lowest in line 0
//! ```
//!
//! So a core reads one stream of memory from beginning to end, and one instruction multiplies four inputs of 16
//! outputs. Four inputs of 16 outputs are also a row of an AMX tile.

use half::{bf16, f16};

use loopq_core::grid::{Grid, ScaleType, Trellis, Values, PARTS};
use loopq_core::memory::reserve;
use loopq_core::{dims, Error, Result};

/// Outputs that a panel holds: two registers of 16 lanes.
pub const PANEL: usize = 32;
/// Bytes of a line, the unit in which everything is stored: a cache line, a 512-bit register.
pub(super) const LINE: usize = 64;
/// Outputs of a line.
pub(super) const LANES: usize = 16;
/// The most inputs that share a scale of the activations and an integer sum.
pub(super) const MAX_BLOCK: usize = 256;
/// Size of the blocks that longer groups are cut into.
const CUT: usize = 128;

/// Bytes of a record above its codes.
pub(super) const JOIN: usize = 2;
/// Bytes that are read from where sixteen rows begin.
pub(super) const READ: usize = 16;

/// How scales are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScaleFormat {
    /// float32.
    F32,
    /// bfloat16.
    Bf16,
    /// float16.
    F16,
}

impl ScaleFormat {
    /// The format of scales of that type.
    fn of(scales: ScaleType) -> Self {
        match scales {
            ScaleType::F32 | ScaleType::Units(_) => Self::F32,
            // Numbers of 8 bits, times a power of two, are numbers of bfloat16.
            ScaleType::Bf16 | ScaleType::E4m3 { .. } | ScaleType::E8m0 => Self::Bf16,
            ScaleType::F16 => Self::F16,
            ScaleType::Short { stored, .. } => Self::of(*stored),
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

    /// A scale rounded to the format.
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
/// another. Each group has its scales, its zero points if there are any (half of one line), then the codes of its
/// blocks. A *unit* is the smallest number of inputs with codes that fill whole lines; a short last unit is padded.
#[derive(Clone, Debug)]
pub struct Layout {
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    pub(super) grid: Grid,
    pub(super) scales: ScaleFormat,
    /// Levels of codes on a table, and the share of a scale that they and codes count.
    pub(super) levels: [i8; 16],
    pub(super) unit: f32,
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
    /// The layout of a weight of `outputs` x `inputs`.
    pub fn new(outputs: usize, inputs: usize, grid: Grid) -> Result<Self> {
        grid.check()?;
        if grid.units().is_some() {
            return Err(Error::setting("the grid", "scales that share units", "scales of their own"));
        }
        if outputs == 0 || inputs == 0 {
            return Err(Error::shape(
                "a packed weight",
                "1 or more outputs and inputs",
                format!("{outputs} x {inputs}"),
            ));
        }
        // A bound for all that follows: no code takes more than a byte, nor a scale and a zero point more than 8.
        dims::product("a packed weight", outputs.saturating_add(PANEL), inputs.saturating_mul(16))?;
        let (unit, unit_bytes) = (unit_inputs(grid.bits), unit_lines(grid.bits) * 2 * LINE);
        let scales = ScaleFormat::of(grid.scale_type);
        let group = grid.group(inputs).min(inputs);
        let cut = if group > MAX_BLOCK { CUT } else { group };
        let header = (scales.lines() + usize::from(!grid.symmetric)) * LINE;
        let (mut offset, mut at, mut step) = (0, 0, 0);
        let mut blocks = Vec::new();
        let n_blocks = inputs / group * group.div_ceil(cut) + (inputs % group).div_ceil(cut);
        reserve("the blocks of a layout", &mut blocks, n_blocks)?;
        for (index, start) in (0..inputs).step_by(group).enumerate() {
            let head = offset;
            offset += header;
            let end = inputs.min(start + group);
            for first in (start..end).step_by(cut) {
                let len = cut.min(end - first);
                let units = len.div_ceil(unit);
                let block = Block { group: index, first, len, at, scales: head, codes: offset, units, step };
                step += block.steps(grid.bits);
                blocks.push(block);
                at += units * unit;
                offset += units * unit_bytes;
            }
        }
        let (panel, row) = (offset, row_bytes(at));
        let (levels, unit) = grid.table().map_or(([0; 16], 1.0), |table| (*table.bytes(), 1.0 / PARTS));
        let (steps, streams) = (step, None);
        let plain = Self { outputs, inputs, grid, scales, levels, unit, blocks, panel, row, steps, streams };
        match grid.values {
            Values::Trellis(trellis) => plain.cut(trellis),
            Values::Even | Values::Table(_) => Ok(plain),
        }
    }

    /// Rows and columns of the weight.
    #[must_use]
    pub fn shape(&self) -> [usize; 2] {
        [self.outputs, self.inputs]
    }

    /// The grid of its codes.
    #[must_use]
    pub fn grid(&self) -> &Grid {
        &self.grid
    }

    /// Groups of a row.
    #[must_use]
    pub fn n_groups(&self) -> usize {
        self.blocks.last().map_or(0, |b| b.group + 1)
    }

    /// Panels; those of a stream are filled up.
    pub(crate) fn n_panels(&self) -> usize {
        let Some(streams) = self.streams else {
            return self.outputs.div_ceil(PANEL);
        };
        let last = (self.outputs - 1) / streams.rows;
        last * streams.panels() + self.stream(streams, last).padded() / PANEL
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
        let row = |l: &Self| (l.inputs, l.grid.group_size, l.grid.bits, l.is_streams());
        row(self) == row(other)
    }

    /// Offset of zero points after the scales.
    pub(super) fn zeros_after_scales(&self) -> usize {
        self.scales.lines() * LINE
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

impl Streams {
    /// Panels of each but the last.
    pub(super) fn panels(&self) -> usize {
        self.rows.div_ceil(PANEL)
    }
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
    /// The same layer with its codes on a trellis, its rows cut into streams.
    fn cut(mut self, trellis: Trellis) -> Result<Self> {
        let streams = Streams { trellis, rows: trellis.stream_rows().min(self.outputs) };
        // Short streams are filled up, so the bound of a plain layout is none of theirs.
        let one = self.stream(streams, 0);
        let bytes = dims::sum("a packed weight", one.header + READ, self.inputs * one.record)?;
        dims::product("a packed weight", self.outputs.div_ceil(streams.rows), bytes)?;
        self.streams = Some(streams);
        Ok(self)
    }

    pub(super) fn stream(&self, streams: Streams, number: usize) -> Stream {
        let of = |rows: usize| {
            let padded = rows.next_multiple_of(PANEL);
            let record = padded * self.grid.bits as usize / 8 + JOIN;
            let header = self.n_groups() * (padded / PANEL) * self.scales.lines() * LINE;
            (record, header)
        };
        let (whole, header) = of(streams.rows);
        let at = number * (header + self.inputs * whole);
        let first = number * streams.rows;
        let rows = streams.rows.min(self.outputs - first);
        let (record, header) = of(rows);
        Stream { first, rows, at, record, header }
    }

    pub(super) fn streams(&self, streams: Streams) -> impl Iterator<Item = Stream> + '_ {
        (0..self.outputs.div_ceil(streams.rows)).map(move |i| self.stream(streams, i))
    }

    /// Bytes of all streams, with those that are read behind the last record.
    fn stream_bytes(&self, streams: Streams) -> usize {
        let last = self.stream(streams, (self.outputs - 1) / streams.rows);
        last.at + last.header + self.inputs * last.record + READ
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
