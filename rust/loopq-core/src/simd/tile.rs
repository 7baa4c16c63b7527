//! The multiply-add tile of `MR` x `NR` entries that Hessian, Cholesky and solver share.
//!
//! It is the micro-kernel of K. Goto and R. van de Geijn, *Anatomy of High-Performance Matrix Multiplication* (ACM TOMS
//! 34, 2008), in the form of F. Van Zee and R. van de Geijn, *BLIS* (ACM TOMS 41, 2015). A block of `c` stays in
//! registers while `k` runs. Each step loads one line of `b`, and broadcasts the `MR` entries of one line of `a`.
//! Unlike that kernel, it promises its bits:
//!
//! 1. Every entry is ONE chain of fused multiply-adds, `c[i][j] + sum_k a[k][i] * b[k][j]` with `k` ascending. Other
//!    kernels unroll `k` and add partial sums at the end; here 24 entries per lane hide the latency instead.
//! 2. So a chain has the same bits in every vector width; [`chain`] below is both fallback and oracle.
//! 3. Cutting `k` in pieces, as callers do to fit their operands into caches, changes no bit either.
#![allow(unsafe_code)] // calls of functions whose instructions an `Isa` has shown to exist

use super::operands::{CHAIN, MR};
use super::{per_isa, Isa};

/// The two number types that factorisations and solvers run in.
pub trait Real:
    bytemuck::Pod
    + Send
    + Sync
    + PartialOrd
    + Default
    + std::fmt::Debug
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
    + std::ops::Neg<Output = Self>
    + 'static
{
    /// Columns of a tile: three cache lines, three 512-bit registers.
    const NR: usize;
    /// The type's name in messages.
    const NAME: &'static str;
    /// `self * a + b`, rounded once.
    #[must_use]
    fn fma(self, a: Self, b: Self) -> Self;
    /// Square root.
    #[must_use]
    fn root(self) -> Self;
    /// Rounds a double to this type.
    #[must_use]
    fn of(value: f64) -> Self;
    /// Widens to a double.
    #[must_use]
    fn wide(self) -> f64;
    /// `c[i][j] += sum_k a[k][i] * b[k][j]` for `MR` x `NR` entries; `lda`, `ldb`, `ldc` are the row strides.
    fn tile(isa: Isa, k: usize, a: &[Self], lda: usize, b: &[Self], ldb: usize, c: &mut [Self], ldc: usize);
}

macro_rules! real {
    ($t:ty, $name:literal, $nr:literal, $avx2:ident, $avx512:ident, $neon:ident) => {
        impl Real for $t {
            const NR: usize = $nr;
            const NAME: &'static str = $name;
            #[inline(always)]
            fn fma(self, a: Self, b: Self) -> Self {
                self.mul_add(a, b)
            }
            #[inline(always)]
            fn root(self) -> Self {
                self.sqrt()
            }
            #[inline(always)]
            fn of(value: f64) -> Self {
                value as $t
            }
            #[inline(always)]
            fn wide(self) -> f64 {
                self.into()
            }
            #[inline]
            fn tile(
                isa: Isa,
                k: usize,
                a: &[$t],
                lda: usize,
                b: &[$t],
                ldb: usize,
                c: &mut [$t],
                ldc: usize,
            ) {
                match isa.level() {
                    #[cfg(target_arch = "x86_64")]
                    // SAFETY: only `Isa::available` makes values above `PORTABLE`, after testing the machine.
                    2 => unsafe { super::x86::$avx2(k, a, lda, b, ldb, c, ldc) },
                    #[cfg(target_arch = "x86_64")]
                    // SAFETY: as above.
                    3.. => unsafe { super::x86::$avx512(k, a, lda, b, ldb, c, ldc) },
                    #[cfg(target_arch = "aarch64")]
                    2 => super::neon::$neon(k, a, lda, b, ldb, c, ldc),
                    _ => chain::<$t, { $nr }>(k, a, lda, b, ldb, c, ldc),
                }
            }
        }
    };
}
real!(f32, "float32", 48, tile_f32_avx2, tile_f32_avx512, tile_f32);
real!(f64, "float64", 24, tile_f64_avx2, tile_f64_avx512, tile_f64);

fn chain<T: Real, const N: usize>(
    k: usize,
    a: &[T],
    lda: usize,
    b: &[T],
    ldb: usize,
    c: &mut [T],
    ldc: usize,
) {
    for i in 0..MR {
        let mut acc = [T::default(); N];
        acc.copy_from_slice(&c[i * ldc..][..N]);
        for p in 0..k {
            let x = a[p * lda + i];
            for (entry, &y) in acc.iter_mut().zip(&b[p * ldb..][..N]) {
                *entry = x.fma(y, *entry);
            }
        }
        c[i * ldc..][..N].copy_from_slice(&acc);
    }
}

/// Columns of a line of a tile of bf16 products.
const LINE: usize = f32::NR;

/// `c[i][j] = sum_k a[k][i] * b[k][j]` over bf16 numbers in float32, in lines [`LINE`] apart. As
/// `docs/formats/hessian.md` defines, chains of [`CHAIN`] rows start from zero; two chains are added, and their sum
/// goes to the total. Inputs are not subnormal. `tiny` says whether a product or a sum could be, which then counts as
/// zero.
pub(crate) fn tile_chains(isa: Isa, k: usize, a: &[f32], b: &[f32], c: &mut [f32], tiny: bool) {
    c.fill(0.0);
    for first in (0..k).step_by(2 * CHAIN) {
        let mut parts = [[0.0_f32; MR * LINE]; 2];
        for (half, part) in parts.iter_mut().enumerate() {
            let at = first + half * CHAIN;
            let n = CHAIN.min(k.saturating_sub(at));
            if n == 0 {
                continue;
            }
            let (a, b) = (&a[at * LINE..], &b[at * LINE..]);
            if tiny {
                flushed(isa, n, a, b, part);
            } else {
                f32::tile(isa, n, a, LINE, b, LINE, part, LINE);
            }
        }
        add_parts(isa, &parts[0], &parts[1], c);
    }
}

per_isa! {
    fn flushed(k: usize, a: &[f32], b: &[f32], c: &mut [f32]) = flushed_body;
}
per_isa! {
    fn add_parts(first: &[f32], second: &[f32], c: &mut [f32]) = add_parts_body;
}

/// One chain; results that are subnormal after rounding count as zero.
#[inline(always)]
fn flushed_body(k: usize, a: &[f32], b: &[f32], c: &mut [f32]) {
    /// The smallest magnitude that rounds to a normal number with an unbounded exponent: half a unit below the smallest
    /// normal number. A sum in double precision of a product of bf16 numbers and a float32 is exact near here.
    const LEAST: f64 = f32::MIN_POSITIVE as f64 * (1.0 - 1.0 / (1 << 25) as f64);
    for (i, line) in c.chunks_exact_mut(LINE).enumerate() {
        for p in 0..k {
            let x = a[p * LINE + i];
            for (entry, &y) in line.iter_mut().zip(&b[p * LINE..][..LINE]) {
                let wide = f64::from(x) * f64::from(y) + f64::from(*entry);
                *entry = if wide.abs() < LEAST { 0.0 } else { x.mul_add(y, *entry) };
            }
        }
    }
}

#[inline(always)]
fn add_parts_body(first: &[f32], second: &[f32], c: &mut [f32]) {
    let flush = |v: f32| if v.abs() < f32::MIN_POSITIVE { 0.0 } else { v };
    for ((entry, x), y) in c.iter_mut().zip(first).zip(second) {
        *entry = flush(*entry + flush(x + y));
    }
}

/// The same sums by the instruction for pairs of bf16 numbers. A word holds two numbers, the first in the high half;
/// `k` counts words, eight to a chain.
///
/// # Panics
/// On another instruction set; callers ask [`Isa::has_pairs`] first.
#[inline]
pub fn tile_pairs(isa: Isa, k: usize, a: &[u32], b: &[u32], c: &mut [f32], tiny: bool) {
    assert!(isa.has_pairs(), "tiles of bf16 pairs need avx512+bf16");
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `has_pairs` is true only for a value that `Isa::available` made after asking the machine.
    unsafe {
        if tiny {
            super::x86::tile_bf16::<true>(k, a, b, c);
        } else {
            super::x86::tile_bf16::<false>(k, a, b, c);
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (k, a, b, c, tiny);
}

/// The tile registers of this thread, ready for products of bf16 numbers where an instruction set has them.
pub(crate) struct TileState(#[cfg(target_arch = "x86_64")] Option<super::amx::Tiles>);

impl TileState {
    /// Makes them ready; a thread has one such value at a time.
    pub(crate) fn of(isa: Isa) -> Self {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `has_tiles` is true only for a value that `Isa::available` made after asking for permission.
        return Self(isa.has_tiles().then(|| unsafe { super::amx::Tiles::configure() }));
        #[cfg(not(target_arch = "x86_64"))]
        {
            let _ = isa;
            Self()
        }
    }

    /// The sums of [`tile_chains`] over runs of tiles with 32 rows each. 16 columns of each of `a` meet 16 of each of
    /// `b`; the sums go to 16 lines of `c`, 48 apart, at different places.
    ///
    /// # Panics
    /// On another instruction set; callers ask [`Isa::has_tiles`] first.
    pub(crate) fn products(&self, a: [&[u32]; 2], b: [&[u32]; 2], c: &mut [f32], at: [[usize; 2]; 2]) {
        #[cfg(target_arch = "x86_64")]
        if let Some(tiles) = &self.0 {
            // SAFETY: such a value has tiles only where `has_tiles` was true, which asked for those of bf16 products.
            return unsafe { super::amx::products(tiles, a, b, c, at) };
        }
        let _ = (self, a, b, c, at);
        unreachable!("tiles of bf16 products need avx512+amx");
    }
}

/// Asks for the cache lines of a slice, which will be needed soon.
#[inline]
pub(crate) fn prefetch(isa: Isa, values: &[i64]) {
    #[cfg(target_arch = "x86_64")]
    if isa.level() >= 2 {
        super::x86::prefetch(values);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (isa, values);
}
