//! Quantization grids: scales, zero points and codes of one group.
//!
//! Codes are kept *biased*: `u` in `0..2^b`, value `(u - z) * s`. A symmetric grid has `z = 2^(b-1)` everywhere, so
//! its signed code `u - z` lies in `-2^(b-1)..2^(b-1)`.

use std::ops::RangeInclusive;

use crate::{dims, Error, Result};

/// How scales are stored. They are rounded to it before any code is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleType {
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// One of these, kept to fewer significant bits, so that `code * scale` needs no rounding in a short type.
    Short {
        /// How they are stored.
        stored: &'static ScaleType,
        /// Significant bits, the leading one included.
        bits: u32,
    },
}

impl ScaleType {
    /// The type with that `NumPy` or torch name; `"bfloat16:5"` keeps five significant bits.
    pub fn parse(name: &str) -> Result<Self> {
        let refused = || {
            Error::setting(
                "scale_dtype",
                format!("{name:?}"),
                "'float32', 'float16', 'bfloat16', or one of them with significant bits, 'bfloat16:5'",
            )
        };
        let (base, bits) = match name.split_once(':') {
            Some((base, bits)) => (base, Some(bits.parse::<u32>().map_err(|_| refused())?)),
            None => (name, None),
        };
        let (stored, most): (&'static Self, u32) = match base {
            "float32" => (&Self::F32, 24),
            "float16" => (&Self::F16, 11),
            "bfloat16" => (&Self::Bf16, 8),
            _ => return Err(refused()),
        };
        match bits {
            None => Ok(*stored),
            Some(bits) if (1..=most).contains(&bits) => Ok(Self::Short { stored, bits }),
            Some(_) => Err(refused()),
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
            Self::Short { stored, .. } => stored.name(),
        }
    }

    /// Rounds through float32 to the stored type, half to even.
    #[must_use]
    pub fn round(self, scale: f64) -> f32 {
        let single = scale as f32;
        match self {
            Self::F32 => single,
            Self::F16 => half::f16::from_f32(single).to_f32(),
            Self::Bf16 => half::bf16::from_f32(single).to_f32(),
            Self::Short { stored, bits } => stored.round(shorten(f64::from(single), bits)),
        }
    }
}

/// Rounds to `bits` significant bits, half to even.
fn shorten(value: f64, bits: u32) -> f64 {
    let dropped = 53 - bits;
    let raw = value.to_bits();
    let tail = raw & ((1 << dropped) - 1);
    let half = 1_u64 << (dropped - 1);
    let kept = raw >> dropped;
    // A carry out of the mantissa lands in the exponent, which is the next power of two.
    let up = u64::from(tail > half || (tail == half && kept & 1 == 1));
    f64::from_bits((kept + up) << dropped)
}

/// How a group's scale is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Search {
    /// From the largest magnitude.
    Max,
    /// The best of [`SHRINK_STEPS`] shrunken scales by weighted square error.
    Mse,
}

impl Search {
    /// The search with that name.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "max" => Ok(Self::Max),
            "mse" => Ok(Self::Mse),
            _ => Err(Error::setting("scale_search", format!("{name:?}"), "'max', 'mse'")),
        }
    }
}

/// Scales tried by [`Search::Mse`]: `1 - k / 100` of the largest, `k = 0..SHRINK_STEPS`.
pub const SHRINK_STEPS: usize = 70;

/// A grid's settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Bits per code: 2, 3, 4 or 8.
    pub bits: u32,
    /// Columns per scale; 0 for one scale per row.
    pub group_size: usize,
    /// Whether zero sits in the middle of the codes.
    pub symmetric: bool,
    /// How scales are stored.
    pub scale_type: ScaleType,
    /// How scales are found.
    pub search: Search,
}

impl Grid {
    /// Refuses bits outside the formats that exist.
    pub fn check(&self) -> Result<()> {
        match self.bits {
            2 | 3 | 4 | 8 => Ok(()),
            other => Err(Error::setting("bits", other, "2, 3, 4, 8")),
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

    /// Groups in a row of `dim`; the last may be ragged.
    #[must_use]
    pub fn n_groups(&self, dim: usize) -> usize {
        dim.div_ceil(self.group(dim))
    }

    /// Largest biased code.
    #[must_use]
    pub fn top(&self) -> u8 {
        ((1_u32 << self.bits) - 1) as u8
    }

    /// Zero point of a symmetric grid.
    #[must_use]
    pub fn middle(&self) -> u8 {
        1 << (self.bits - 1)
    }

    /// Scale and zero point that reach from `low <= 0` to `high >= 0`.
    ///
    /// # Errors
    /// [`Error::ScaleRange`] with row and group 0: the caller knows where it is.
    pub(crate) fn widest(&self, low: f64, high: f64) -> Result<Level> {
        if low == 0.0 && high == 0.0 {
            return Ok(Level { scale: 1.0, zero: if self.symmetric { self.middle() } else { 0 } });
        }
        self.level(low, high, 1.0)
    }

    /// The `k`-th candidate of [`Search::Mse`], if the stored type can hold it.
    pub(crate) fn shrunk(&self, low: f64, high: f64, k: usize) -> Option<Level> {
        if low == 0.0 && high == 0.0 {
            return None;
        }
        self.level(low, high, 1.0 - k as f64 / 100.0).ok()
    }

    fn level(&self, low: f64, high: f64, shrink: f64) -> Result<Level> {
        let exact = if self.symmetric {
            high.max(-low) / f64::from(self.middle() - 1) * shrink
        } else {
            (high - low) / f64::from(self.top()) * shrink
        };
        let scale = self.scale_type.round(exact);
        if scale == 0.0 || !scale.is_finite() {
            let what = if scale == 0.0 { "zero" } else { "infinite" };
            return Err(Error::ScaleRange {
                row: 0,
                group: 0,
                value: exact,
                what,
                dtype: self.scale_type.name(),
            });
        }
        let zero = if self.symmetric {
            self.middle()
        } else {
            (-low * shrink / f64::from(scale)).round_ties_even().clamp(0.0, f64::from(self.top())) as u8
        };
        Ok(Level { scale, zero })
    }
}

/// Scale and zero point of one group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Level {
    /// Distance of neighbouring values.
    pub scale: f32,
    /// The code of zero.
    pub zero: u8,
}

impl Level {
    /// The nearest biased code; the quotient is taken in double precision and rounded half to even.
    #[inline(always)]
    #[must_use]
    pub fn code(self, value: f64, top: u8) -> u8 {
        let steps = (value / f64::from(self.scale)).round_ties_even();
        (steps + f64::from(self.zero)).clamp(0.0, f64::from(top)) as u8
    }

    /// What a code stands for.
    #[inline(always)]
    #[must_use]
    pub fn value(self, code: u8) -> f32 {
        (f32::from(code) - f32::from(self.zero)) * self.scale
    }
}

/// A quantized matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    /// Biased codes, row-major.
    pub codes: Vec<u8>,
    /// Scales (rows, groups).
    pub scales: Vec<f32>,
    /// Zero points (rows, groups).
    pub zeros: Vec<u8>,
}

/// `(code - zero) * scale` for every entry; the product is rounded to float32.
pub fn dequantize(
    codes: &[u8],
    scales: &[f32],
    zeros: &[u8],
    rows: usize,
    dim: usize,
    group: usize,
) -> Result<Vec<f32>> {
    dims::check_matrix("codes", codes, rows, dim)?;
    let n_groups = dim.div_ceil(group.max(1));
    dims::check_matrix("scales", scales, rows, n_groups)?;
    dims::check_matrix("zeros", zeros, rows, n_groups)?;
    let mut out = Vec::with_capacity(codes.len());
    for r in 0..rows {
        for (j, chunk) in codes[r * dim..(r + 1) * dim].chunks(group.max(1)).enumerate() {
            let level = Level { scale: scales[r * n_groups + j], zero: zeros[r * n_groups + j] };
            out.extend(chunk.iter().map(|&code| level.value(code)));
        }
    }
    Ok(out)
}

/// Signed codes of a symmetric grid: `u - 2^(bits - 1)`.
#[must_use]
pub fn to_signed(codes: &[u8], bits: u32) -> Vec<i8> {
    let middle = 1_u8 << (bits - 1);
    codes.iter().map(|&u| u.wrapping_sub(middle) as i8).collect()
}

/// Biased codes of signed ones: `q + zero_offset`, each checked to fit `bits` bits.
pub fn to_biased(codes: &[i8], dim: usize, bits: u32, zero_offset: i64) -> Result<Vec<u8>> {
    let found = shifted(codes, zero_offset, 0..=(1 << bits) - 1, |u| u as u8);
    found.map_err(|i| Error::CodeRange {
        row: i / dim.max(1),
        column: i % dim.max(1),
        value: i64::from(codes[i]),
        bits,
        zero_offset,
    })
}

/// Signed codes `u - zero_offset`; refuses what int8 cannot hold.
pub fn to_signed_by(codes: &[u8], zero_offset: i64) -> Result<Vec<i8>> {
    let range = i32::from(i8::MIN)..=i32::from(i8::MAX);
    let found = shifted(codes, zero_offset.saturating_neg(), range, |q| q as i8);
    found.map_err(|column| {
        let value = i64::from(codes[column]) - zero_offset;
        Error::CodeRange { row: 0, column, value, bits: 8, zero_offset }
    })
}

/// `code + offset`, narrowed, or the place of the first code that this takes out of `range`. That place is looked for only
/// when there is one: the loop has no branch and runs at the speed of memory.
fn shifted<A: Copy + Into<i32>, B>(
    codes: &[A],
    offset: i64,
    range: RangeInclusive<i32>,
    narrow: impl Fn(i32) -> B,
) -> std::result::Result<Vec<B>, usize> {
    // Codes have 8 bits: an offset beyond 1000 takes all of them out of any range, and so does 1000.
    let offset = offset.clamp(-1000, 1000) as i32;
    let mut outside = false;
    let moved = codes.iter().map(|&code| {
        let value = code.into() + offset;
        outside |= !range.contains(&value);
        narrow(value)
    });
    let out = moved.collect();
    if outside {
        return Err(codes.iter().position(|&code| !range.contains(&(code.into() + offset))).unwrap_or(0));
    }
    Ok(out)
}

/// `code * scale` for signed codes of a symmetric grid.
pub fn dequantize_signed(
    codes: &[i8],
    scales: &[f32],
    rows: usize,
    dim: usize,
    group: usize,
) -> Result<Vec<f32>> {
    dims::check_matrix("codes", codes, rows, dim)?;
    let n_groups = dim.div_ceil(group.max(1));
    dims::check_matrix("scales", scales, rows, n_groups)?;
    let mut out = Vec::with_capacity(codes.len());
    for r in 0..rows {
        for (j, chunk) in codes[r * dim..(r + 1) * dim].chunks(group.max(1)).enumerate() {
            let scale = scales[r * n_groups + j];
            out.extend(chunk.iter().map(|&code| f32::from(code) * scale));
        }
    }
    Ok(out)
}
