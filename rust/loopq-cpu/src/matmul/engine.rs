//! Instruction sets for the products.

use super::activations::Order;
use super::layout::Layout;
use super::portable::Portable;
use super::streams::Part;
use super::tile::{panel, Panel};
use super::versions::{for_bits_and_limbs, for_bits_and_words};
#[cfg(target_arch = "x86_64")]
use loopq_core::simd::amx;
use loopq_core::simd::Answer;

/// An instruction set for products with panels. Only [`Engine::available`] makes values, after testing the machine:
/// holding one proves that its instructions exist here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Engine(Kind);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Vnni,
    #[cfg(target_arch = "x86_64")]
    Vbmi,
    #[cfg(target_arch = "x86_64")]
    Amx,
    #[cfg(target_arch = "aarch64")]
    Neon,
}

/// All, in the order of their declaration.
const KINDS: &[Kind] = &[
    Kind::Portable,
    #[cfg(target_arch = "x86_64")]
    Kind::Avx2,
    #[cfg(target_arch = "x86_64")]
    Kind::Vnni,
    #[cfg(target_arch = "x86_64")]
    Kind::Vbmi,
    #[cfg(target_arch = "x86_64")]
    Kind::Amx,
    #[cfg(target_arch = "aarch64")]
    Kind::Neon,
];

impl Engine {
    /// The instructions that the compiler's target guarantees.
    pub const PORTABLE: Self = Self(Kind::Portable);

    /// All that this machine can run, best last.
    #[must_use]
    pub fn available() -> Vec<Self> {
        let mut found = vec![Self::PORTABLE];
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if has!("avx2") && has!("fma") && has!("f16c") {
                found.push(Self(Kind::Avx2));
            }
            let wide = has!("avx512f") && has!("avx512bw") && has!("avx512vl") && has!("avx512dq");
            if wide && has!("avx512vnni") && has!("fma") {
                found.push(Self(Kind::Vnni));
                if has!("avx512vbmi") {
                    found.push(Self(Kind::Vbmi));
                    // Every processor with AMX has VBMI.
                    if amx::permitted(amx::INT8) {
                        found.push(Self(Kind::Amx));
                    }
                }
            }
        }
        #[cfg(target_arch = "aarch64")]
        if std::arch::is_aarch64_feature_detected!("dotprod") {
            found.push(Self(Kind::Neon));
        }
        found
    }

    /// The best one of this machine.
    #[must_use]
    pub fn best() -> Self {
        static BEST: Answer = Answer::unknown();
        let best = || Self::available().last().map_or(Kind::Portable, |engine| engine.0) as u8;
        let found = BEST.or_find(best);
        Self(KINDS.get(usize::from(found)).copied().unwrap_or(Kind::Portable))
    }

    /// Its name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self.0 {
            Kind::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Kind::Vnni => "avx512vnni",
            #[cfg(target_arch = "x86_64")]
            Kind::Vbmi => "avx512vnni+vbmi",
            #[cfg(target_arch = "x86_64")]
            Kind::Amx => "amx+avx512vnni",
            #[cfg(target_arch = "aarch64")]
            Kind::Neon => "neon+dotprod",
        }
    }

    /// The order in which activations of so many tokens are read.
    pub(crate) fn order(self, layout: &Layout, tokens: usize) -> Order {
        match self.0 {
            // A tile has sixteen tokens; for one or two it would be mostly empty. Values on a trellis fit no byte.
            #[cfg(target_arch = "x86_64")]
            Kind::Amx if tokens > 2 && !layout.is_streams() => Order::Tiles,
            _ => Order::Rows,
        }
    }

    /// Multiplies panels.
    #[allow(unsafe_code)]
    pub(super) fn run(self, p: Panel<'_>) {
        match self.0 {
            // SAFETY: plain Rust runs anywhere.
            Kind::Portable => unsafe { for_bits_and_limbs!(panel, Portable, [1, 1, 1], p) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: such a value is made only after asking the machine.
            Kind::Avx2 => unsafe { super::x86::panel_avx2(p) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Kind::Vnni | Kind::Vbmi => unsafe { super::x86::panel_vnni(p) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Kind::Amx if p.rows.order == Order::Rows => unsafe { super::x86::panel_vnni(p) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Kind::Amx => unsafe { super::x86::panel_amx(p) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as above.
            Kind::Neon => unsafe { super::neon::panel_neon(p) },
        }
    }

    /// Multiplies part of a stream of codes on a trellis; adds to `out`.
    #[allow(unsafe_code)]
    pub(super) fn run_streams(self, p: &Part<'_>, out: &mut [f32]) {
        match self.0 {
            // SAFETY: plain Rust runs anywhere.
            Kind::Portable => unsafe { for_bits_and_words!(Portable, [1, 1], p, out) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: such a value is made only after asking the machine.
            Kind::Avx2 => unsafe { super::x86::streams_avx2(p, out) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Kind::Vnni => unsafe { super::x86::streams_vnni(p, out) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Kind::Vbmi | Kind::Amx => unsafe { super::x86::streams_vbmi(p, out) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as above.
            Kind::Neon => unsafe { super::neon::streams_neon(p, out) },
        }
    }
}
