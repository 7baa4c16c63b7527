//! Instruction sets: the register tile that all products run on, and a macro that compiles a loop for each set.
//!
//! A leaf: it uses nothing else of this crate.

#[cfg(target_arch = "x86_64")]
pub mod amx;
mod answer;
mod axpy;
mod dots;
#[cfg(target_arch = "aarch64")]
mod neon;
mod operands;
mod rows;
mod tile;
mod ways;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use answer::Answer;
pub(crate) use axpy::{axpy, dot};
pub(crate) use dots::dots;
pub use operands::MR;
pub(crate) use operands::{Short, Ways, CODES, NODES};
pub(crate) use rows::add_rows;
pub(crate) use tile::{prefetch, tile_chains, TileState};
pub use tile::{tile_pairs, Real};
pub(crate) use ways::cheapest;

/// An instruction set that tiles can be run with. Only [`Isa::available`] makes values, after testing the machine:
/// holding one proves that its instructions exist here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Isa(u8);

impl Isa {
    /// The instructions that the compiler's target guarantees.
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
                if amx::permitted(amx::BF16) {
                    found.push(Self(5));
                }
            }
        }
        // Part of the architecture.
        #[cfg(target_arch = "aarch64")]
        found.push(Self(2));
        found
    }

    /// The best one of this machine.
    #[must_use]
    pub fn best() -> Self {
        static BEST: Answer = Answer::unknown();
        Self(BEST.or_find(|| Self::available().last().map_or(Self::PORTABLE.0, |isa| isa.0)))
    }

    /// Whether products of bf16 pairs are one instruction.
    #[must_use]
    pub fn has_pairs(self) -> bool {
        self.0 >= 4
    }

    /// Whether that instruction is faster than the multiply-adds that it stands for. On Intel's processors it takes nearly
    /// twice as long as they do, on AMD's half as long (docs/performance.md).
    pub(crate) fn has_fast_pairs(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        if self.has_pairs() {
            let vendor = std::arch::x86_64::__cpuid(0);
            return (vendor.ebx, vendor.edx, vendor.ecx) != (0x756e_6547, 0x4965_6e69, 0x6c65_746e);
        }
        let _ = self;
        false
    }

    /// Whether products of 16 x 16 bf16 numbers, 32 deep, are one instruction.
    #[must_use]
    pub fn has_tiles(self) -> bool {
        self.0 == 5
    }

    /// Its name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self.0 {
            2 if cfg!(target_arch = "aarch64") => "neon",
            2 => "avx2+fma",
            3 => "avx512",
            4 => "avx512+bf16",
            5 => "avx512+amx",
            _ => "portable",
        }
    }

    /// 1 portable, 2 AVX2 or NEON, 3 AVX-512, 4 AVX-512 with bf16 products, 5 with AMX tiles of them.
    #[inline]
    #[must_use]
    pub fn level(self) -> u8 {
        self.0
    }
}

/// Makes a function that runs `body`, compiled once for each instruction set, in the version of its first argument.
///
/// A body is marked `#[inline(always)]`, so that it takes on the instructions of its caller, holds no intrinsics and
/// calls nothing that is not inlined too. Its arithmetic is exact or correctly rounded element by element, and Rust
/// never fuses or reorders it, so every version gives the same bits.
#[doc(hidden)]
#[macro_export]
macro_rules! per_isa {
    ($(#[$doc:meta])* $vis:vis fn $name:ident $(<$($t:ident: $bound:ident),+>)? ($($arg:ident: $of:ty),*) $(-> $out:ty)?
        = $body:path;) => {
        $(#[$doc])*
        #[allow(unsafe_code)] // calls of functions whose instructions `isa` has shown to exist
        $vis fn $name$(<$($t: $bound),+>)?(isa: $crate::simd::Isa, $($arg: $of),*) $(-> $out)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn narrow$(<$($t: $bound),+>)?($($arg: $of),*) $(-> $out)? {
                    $body($($arg),*)
                }
                #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,fma")]
                fn wide$(<$($t: $bound),+>)?($($arg: $of),*) $(-> $out)? {
                    $body($($arg),*)
                }
                match isa.level() {
                    // SAFETY: `Isa` values above the portable one are made only after asking the machine.
                    2 => return unsafe { narrow($($arg),*) },
                    // SAFETY: as above.
                    3.. => return unsafe { wide($($arg),*) },
                    _ => {}
                }
            }
            let _ = isa;
            $body($($arg),*)
        }
    };
}
#[doc(inline)]
pub use per_isa;
