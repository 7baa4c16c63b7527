//! Register tiles: the innermost loops, one version per instruction set.
//!
//! Every tile computes `c[i][j] + s * sum_k a[k][i] * b[k][j]` as ONE chain of fused multiply-adds per entry, `k`
//! ascending. A chain has the same bits in every vector width, so the portable version is both fallback and oracle,
//! and cutting `k` in pieces changes nothing.
#![allow(unsafe_code)] // one of the two places that may; each block says why it is sound

mod tile;

pub use tile::{tile, Real, MR};

/// An instruction set that tiles can be run with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Whatever the compiler's target guarantees.
    Portable,
    /// 256-bit vectors with fused multiply-add.
    Avx2,
    /// 512-bit vectors.
    Avx512,
    /// 512-bit vectors with products of bf16 pairs.
    Avx512Bf16,
}

impl Isa {
    /// All that this machine can run, best last.
    #[must_use]
    pub fn available() -> Vec<Self> {
        let mut found = vec![Self::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                found.push(Self::Avx2);
                let wide = is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl");
                if wide {
                    found.push(Self::Avx512);
                    if is_x86_feature_detected!("avx512bf16") {
                        found.push(Self::Avx512Bf16);
                    }
                }
            }
        }
        found
    }

    /// The best one of this machine.
    #[must_use]
    pub fn best() -> Self {
        Self::available().last().copied().unwrap_or(Self::Portable)
    }

    /// Its name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2+fma",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512+bf16",
        }
    }
}
