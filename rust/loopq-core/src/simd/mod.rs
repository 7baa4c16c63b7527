//! Register tiles: the innermost loops, one version per instruction set.
//!
//! Every tile computes `c[i][j] + s * sum_k a[k][i] * b[k][j]` as ONE chain of fused multiply-adds per entry, `k`
//! ascending. A chain has the same bits in every vector width, so the portable version is both fallback and oracle,
//! and cutting `k` in pieces changes nothing.
#![allow(unsafe_code)] // one of the two places that may; each block says why it is sound

mod lanes;
mod tile;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(crate) use lanes::{
    axpy, lane_cost, lane_range, pack_dense, pack_marlin, pack_pairs, pack_single, round_column, round_row,
    top_magnitude, unpack_dense, unpack_marlin, Column, Lanes,
};
pub(crate) use tile::{add_limbs, prefetch};
pub use tile::{tile_pairs, Real, MR};

/// An instruction set that tiles can be run with. Values come from [`Isa::available`] only, which asks the machine:
/// holding one is the proof that its instructions exist here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Isa(u8);

impl Isa {
    /// Whatever the compiler's target guarantees.
    pub const PORTABLE: Self = Self(1);

    /// All that this machine can run, best last.
    #[must_use]
    pub fn available() -> Vec<Self> {
        let mut found = vec![Self::PORTABLE];
        #[cfg(target_arch = "x86_64")]
        {
            let narrow = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            let wide = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl");
            if narrow {
                found.push(Self(2));
            }
            if narrow && wide {
                found.push(Self(3));
            }
            if narrow && wide && is_x86_feature_detected!("avx512bf16") {
                found.push(Self(4));
            }
        }
        found
    }

    /// The best one of this machine.
    #[must_use]
    pub fn best() -> Self {
        Self::available().last().copied().unwrap_or(Self::PORTABLE)
    }

    /// Whether products of bf16 pairs are one instruction.
    #[must_use]
    pub fn has_pairs(self) -> bool {
        self.0 == 4
    }

    /// Its name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self.0 {
            2 => "avx2+fma",
            3 => "avx512",
            4 => "avx512+bf16",
            _ => "portable",
        }
    }

    fn level(self) -> u8 {
        self.0
    }
}
