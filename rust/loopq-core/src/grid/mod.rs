//! Quantization grids: the scales, zero points and codes that a group of weights can have.
//!
//! Codes are kept *biased*: `u` in `0..2^b`, value `(u - z) * s`. A symmetric grid has `z = 2^(b-1)` everywhere, so
//! its signed code `u - z` lies in `-2^(b-1)..2^(b-1)`. On a table the value is `level[u] * s` (`table`). An offset may be
//! added (`units`): an asymmetric grid with offsets has `z = 0`.

mod codes;
mod fitting;
mod rounding;
mod rtn;
mod scale_type;
mod scales;
mod search;
mod steps;
mod table;
mod trellis;
mod units;

pub use codes::{add_offsets, dequantize, to_biased, to_signed, to_signed_by};
pub use fitting::fitted;
pub(crate) use rounding::{by_steps, Rounding};
pub use rtn::rtn;
pub use scale_type::ScaleType;
pub(crate) use scales::GroupScales;
pub(crate) use search::fit;
pub use search::SHRINK_STEPS;
pub(crate) use steps::Steps;
pub use table::{Table, PARTS};
pub use trellis::{decode, mix, value, Trellis, FACTOR, OFFSET};
pub use units::Units;
pub(crate) use units::{fit_units, Part};

use crate::memory::{collected, zeros};
use crate::{dims, Error, Result};

/// The search for a group's scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Search {
    /// The largest magnitude gets the highest code; without signs the lowest code stays unused.
    Max,
    /// The largest magnitude becomes half the range of codes away from zero, as in compressed-tensors. All codes are
    /// used, and a positive largest magnitude is clipped by half a step.
    HalfRange,
    /// The best of 70 shrunken ones by weighted square error.
    Mse,
}

impl Search {
    /// The search with that name.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "max" => Ok(Self::Max),
            "half-range" => Ok(Self::HalfRange),
            "mse" => Ok(Self::Mse),
            _ => Err(Error::setting("scale_search", format!("{name:?}"), "'max', 'half-range', 'mse'")),
        }
    }
}

/// Refuses bits outside the formats that exist.
pub(crate) fn check_bits(bits: u32) -> Result<()> {
    match bits {
        2 | 3 | 4 | 8 => Ok(()),
        other => Err(Error::setting("bits", other, "2, 3, 4, 8")),
    }
}

/// The value of codes, in units of the scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// Codes less the zero point.
    Even,
    /// Entries of a table.
    Table(Table),
    /// Values that depend on several codes.
    Trellis(Trellis),
}

/// A grid's settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Bits per code: 2, 3, 4 or 8.
    pub bits: u32,
    /// Columns per scale; 0 for one scale per row.
    pub group_size: usize,
    /// Whether zero sits in the middle of the codes.
    pub symmetric: bool,
    /// Whether a scale may be negative. A symmetric grid has one code more below zero than above; a negative scale
    /// turns it round at no cost in bytes, which matters at two and three bits.
    pub signed: bool,
    /// How scales are stored.
    pub scale_type: ScaleType,
    /// How scales are found.
    pub search: Search,
    /// The value of codes.
    pub values: Values,
}

impl Grid {
    /// Refuses bits outside the formats that exist, and values that codes of such a grid cannot have.
    pub fn check(&self) -> Result<()> {
        if !(matches!(self.bits, 5 | 6) && self.units().is_some()) {
            check_bits(self.bits)?;
        }
        let (what, bits) = match self.values {
            Values::Even => return Ok(()),
            Values::Table(table) => ("a grid of levels", usize::BITS - (table.len() - 1).leading_zeros()),
            Values::Trellis(trellis) => ("a grid of codes on a trellis", trellis.bits()),
        };
        // Two levels take two bits, the fewest that there are.
        if self.symmetric && bits.max(2) == self.bits {
            return Ok(());
        }
        let got = format!("{} bits, symmetric: {}", self.bits, self.symmetric);
        Err(Error::setting(what, got, format!("{} bits, symmetric", bits.max(2))))
    }

    /// Refuses a grid with values that depend on several codes.
    pub fn check_plain(&self) -> Result<()> {
        self.check()?;
        match self.values {
            Values::Trellis(_) => {
                Err(Error::setting("the grid", "codes on a trellis", "codes of a plain grid"))
            }
            Values::Even | Values::Table(_) => Ok(()),
        }
    }

    /// Its trellis.
    pub fn on_trellis(&self) -> Result<Trellis> {
        self.check()?;
        match self.values {
            Values::Trellis(trellis) => Ok(trellis),
            Values::Even | Values::Table(_) => {
                Err(Error::setting("the grid", "codes of a plain grid", "codes on a trellis"))
            }
        }
    }

    /// Columns per group in a row of `dim`.
    #[must_use]
    pub fn group(&self, dim: usize) -> usize {
        if self.group_size == 0 {
            dim.max(1)
        } else {
            self.group_size
        }
    }

    /// Columns of the groups that share units; of one group where none do.
    #[must_use]
    pub fn block(&self, dim: usize) -> usize {
        self.group(dim) * self.units().map_or(1, |units| units.groups())
    }

    /// The units that groups share.
    #[must_use]
    pub fn units(&self) -> Option<Units> {
        match self.scale_type {
            ScaleType::Units(units) => Some(units),
            _ => None,
        }
    }

    /// Groups in a row of `dim`; the last may be ragged.
    #[must_use]
    pub fn n_groups(&self, dim: usize) -> usize {
        dim.div_ceil(self.group(dim))
    }

    /// Its table of levels; refuses a grid without one.
    pub(crate) fn on_table(&self) -> Result<&Table> {
        let none = || Error::setting("the grid", "codes without a table", "levels of a table");
        self.table().ok_or_else(none)
    }

    /// Its table of levels.
    #[must_use]
    pub fn table(&self) -> Option<&Table> {
        match &self.values {
            Values::Table(table) => Some(table),
            Values::Even | Values::Trellis(_) => None,
        }
    }

    /// Largest biased code.
    #[must_use]
    pub fn top(&self) -> u8 {
        self.table().map_or(((1_u32 << self.bits) - 1) as u8, |table| table.len() as u8 - 1)
    }

    /// Zero point of a symmetric grid.
    #[must_use]
    pub fn middle(&self) -> u8 {
        1 << (self.bits - 1)
    }
}

/// Scale and zero point of one group.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GroupScale {
    /// Distance of neighbouring values.
    pub scale: f32,
    /// The code of zero, or of the offset where there is one.
    pub zero: u8,
    /// Added to all values.
    pub offset: f32,
    /// Units of scale and offset where groups share units: both are whole multiples.
    pub units: [f32; 2],
}

/// A quantized matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    /// Biased codes, row-major.
    pub codes: Vec<u8>,
    /// Scales, zero points and offsets (rows, groups).
    pub scales: Vec<GroupScale>,
}

impl Quantized {
    /// Zeros for a weight of `rows` x `dim`.
    pub(crate) fn zeroed(rows: usize, dim: usize, grid: &Grid) -> Result<Self> {
        let n_scales = dims::product("scales", rows, grid.n_groups(dim))?;
        Ok(Self {
            codes: zeros("codes", dims::product("codes", rows, dim)?)?,
            scales: collected("scales", (0..n_scales).map(|_| GroupScale::default()))?,
        })
    }

    /// Scales (rows, groups).
    pub fn scales(&self) -> Result<Vec<f32>> {
        collected("scales", self.scales.iter().map(|one| one.scale))
    }

    /// Zero points (rows, groups).
    pub fn zeros(&self) -> Result<Vec<u8>> {
        collected("zero points", self.scales.iter().map(|one| one.zero))
    }

    /// Offsets (rows, groups).
    pub fn offsets(&self) -> Result<Vec<f32>> {
        collected("offsets", self.scales.iter().map(|one| one.offset))
    }
}
