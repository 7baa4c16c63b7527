//! The multiply-add tile of `MR` x `NR` entries that Hessian, Cholesky and solver share.
//!
//! It is the micro-kernel of K. Goto and R. van de Geijn, *Anatomy of High-Performance Matrix Multiplication* (ACM
//! TOMS 34, 2008), in the form of F. Van Zee and R. van de Geijn, *BLIS* (ACM TOMS 41, 2015): a block of `c` stays in
//! registers while `k` runs; each step loads one line of `b`, and broadcasts the `MR` entries of one line of `a`. What
//! differs is the promise:
//!
//! 1. Every entry is ONE chain of fused multiply-adds, `c[i][j] + sum_k a[k][i] * b[k][j]` with `k` ascending. There
//!    are no partial sums to add up at the end, which is what other kernels gain by unrolling `k`; 24 entries per
//!    lane hide the latency instead.
//! 2. So a chain has the same bits in every vector width: [`chain`] below is both fallback and oracle.
//! 3. And cutting `k` in pieces, which is how callers fit their operands into caches, changes nothing either.
#![allow(unsafe_code)] // calls of functions whose instructions an `Isa` has shown to exist

use super::Isa;

/// Rows of a tile.
pub const MR: usize = 8;

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
    ($t:ty, $name:literal, $nr:literal, $avx2:ident, $avx512:ident) => {
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
                    // SAFETY: `Isa` values above `PORTABLE` are made by `Isa::available`, which asked the machine.
                    2 => unsafe { super::x86::$avx2(k, a, lda, b, ldb, c, ldc) },
                    #[cfg(target_arch = "x86_64")]
                    // SAFETY: as above.
                    3.. => unsafe { super::x86::$avx512(k, a, lda, b, ldb, c, ldc) },
                    _ => chain::<$t, { $nr }>(k, a, lda, b, ldb, c, ldc),
                }
            }
        }
    };
}
real!(f32, "float32", 48, tile_f32_avx2, tile_f32_avx512);
real!(f64, "float64", 24, tile_f64_avx2, tile_f64_avx512);

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

/// `c[i][j] = sum over pairs` of products of bf16 numbers, two to a word: the pair's two products enter as the machine's
/// instruction orders and rounds them, onto a chain that starts at zero.
///
/// # Panics
/// On another instruction set; callers ask [`Isa::has_pairs`] first.
#[inline]
pub fn tile_pairs(
    isa: Isa,
    k: usize,
    a: &[u32],
    lda: usize,
    b: &[u32],
    ldb: usize,
    c: &mut [f32],
    ldc: usize,
) {
    assert!(isa.has_pairs(), "tiles of bf16 pairs need avx512+bf16");
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `has_pairs` is true only for a value that `Isa::available` made after asking the machine.
    unsafe {
        super::x86::tile_bf16(k, a, lda, b, ldb, c, ldc);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (k, a, lda, b, ldb, c, ldc);
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
