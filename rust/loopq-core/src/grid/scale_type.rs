//! Number types of stored scales.

use crate::grid::Units;
use crate::{Error, Result};

/// How scales are stored. They are rounded to it before any code is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleType {
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// A float of 8 bits, four exponent and three mantissa, times a power of two.
    E4m3 {
        /// The power.
        exponent: i32,
    },
    /// A power of two.
    E8m0,
    /// Whole numbers of units that groups share.
    Units(Units),
    /// One of these, kept to fewer significant bits, so that `code * scale` needs no rounding in a short type.
    Short {
        /// How they are stored.
        stored: &'static ScaleType,
        /// Significant bits, the leading one included.
        bits: u32,
    },
}

impl ScaleType {
    /// The type with that `NumPy` or torch name, kept to so many significant bits; all of them when absent. Numbers of
    /// `float8_e4m3fn` are times `2^exponent`.
    pub fn parse(name: &str, bits: Option<u32>, exponent: i32) -> Result<Self> {
        match (name, bits) {
            ("float8_e4m3fn", None) if (-100..=100).contains(&exponent) => {
                return Ok(Self::E4m3 { exponent })
            }
            ("float8_e8m0fnu", None) => return Ok(Self::E8m0),
            _ => {}
        }
        let (stored, most): (&'static Self, u32) = match name {
            "float32" => (&Self::F32, 24),
            "float16" => (&Self::F16, 11),
            "bfloat16" => (&Self::Bf16, 8),
            _ => {
                let allowed = "'float32', 'float16', 'bfloat16', 'float8_e4m3fn' within 2^-100 to 2^100, 'float8_e8m0fnu'";
                return Err(Error::setting("scale_dtype", format!("{name:?}"), allowed));
            }
        };
        match bits {
            None => Ok(*stored),
            Some(bits) if (1..=most).contains(&bits) => Ok(Self::Short { stored, bits }),
            Some(bits) => Err(Error::setting("scale_bits", bits, format!("1 to {most} of {name}"))),
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 | Self::Units(_) => "float16",
            Self::Bf16 => "bfloat16",
            Self::E4m3 { .. } => "float8_e4m3fn",
            Self::E8m0 => "float8_e8m0fnu",
            Self::Short { stored, .. } => stored.name(),
        }
    }

    /// The smallest number that it holds in full precision.
    pub(crate) fn least(self) -> f32 {
        match self {
            Self::F16 | Self::Units(_) => (-14.0_f64).exp2() as f32,
            Self::F32 | Self::Bf16 => f32::MIN_POSITIVE,
            Self::Short { stored, .. } => stored.least(),
            Self::E4m3 { .. } | Self::E8m0 => self.some(),
        }
    }

    /// A number that it holds exactly.
    pub(crate) fn some(self) -> f32 {
        match self {
            Self::E4m3 { exponent } => (f64::from(exponent)).exp2() as f32,
            _ => 1.0,
        }
    }

    /// Rounds through float32 to the stored type, half to even.
    #[must_use]
    pub fn round(self, scale: f64) -> f32 {
        let single = scale as f32;
        match self {
            Self::F32 => single,
            Self::F16 | Self::Units(_) => half::f16::from_f32(single).to_f32(),
            Self::Bf16 => half::bf16::from_f32(single).to_f32(),
            Self::E4m3 { exponent } => e4m3(f64::from(single), exponent),
            Self::E8m0 => e8m0(f64::from(single)),
            Self::Short { stored, bits } => stored.round(shorten(f64::from(single), bits)),
        }
    }
}

/// Half to even; infinite above the largest, 448 times the power.
fn e4m3(value: f64, exponent: i32) -> f32 {
    let unit = f64::from(exponent).exp2();
    let size = value.abs() / unit;
    // Below 2^-6 the step stays 2^-9.
    let rounded = if size < 0.015_625 { (size * 512.0).round_ties_even() / 512.0 } else { shorten(size, 4) };
    let kept = if rounded <= 448.0 { rounded * unit } else { f64::INFINITY };
    kept.copysign(value) as f32
}

/// The nearest power of two in the range of e8m0 (exponents -127 to 127); zero below it, infinite above.
fn e8m0(value: f64) -> f32 {
    let rounded = shorten(value, 1);
    match rounded.abs().log2() {
        power if power > 127.0 => f32::INFINITY,
        power if power < -127.0 => 0.0,
        _ => rounded as f32,
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
