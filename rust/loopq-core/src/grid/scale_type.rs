//! Number types of stored scales.

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
    /// One of these, kept to fewer significant bits, so that `code * scale` needs no rounding in a short type.
    Short {
        /// How they are stored.
        stored: &'static ScaleType,
        /// Significant bits, the leading one included.
        bits: u32,
    },
}

impl ScaleType {
    /// The type with that `NumPy` or torch name, kept to so many significant bits; all of them when absent.
    pub fn parse(name: &str, bits: Option<u32>) -> Result<Self> {
        let (stored, most): (&'static Self, u32) = match name {
            "float32" => (&Self::F32, 24),
            "float16" => (&Self::F16, 11),
            "bfloat16" => (&Self::Bf16, 8),
            _ => {
                let allowed = "'float32', 'float16', 'bfloat16'";
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
