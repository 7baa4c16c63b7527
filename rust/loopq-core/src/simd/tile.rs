//! The multiply-add tile of `MR` x `NR` entries that Hessian, Cholesky and solver share.

use super::Isa;

/// Rows of a tile.
pub const MR: usize = 8;

/// The two number types that factorisations and solvers run in.
pub trait Real:
    Copy
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
    /// Columns of a tile: six cache lines' worth of bytes, three 512-bit registers.
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
    /// Runs the tile of instruction set `isa`.
    fn run_tile(
        isa: Isa,
        k: usize,
        a: &[Self],
        lda: usize,
        b: &[Self],
        ldb: usize,
        c: &mut [Self],
        ldc: usize,
    );
}

macro_rules! real {
    ($t:ty, $name:literal, $nr:literal) => {
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
            fn run_tile(
                isa: Isa,
                k: usize,
                a: &[$t],
                lda: usize,
                b: &[$t],
                ldb: usize,
                c: &mut [$t],
                ldc: usize,
            ) {
                #[cfg(target_arch = "x86_64")]
                {
                    #[target_feature(enable = "avx2,fma")]
                    fn avx2(
                        k: usize,
                        a: &[$t],
                        lda: usize,
                        b: &[$t],
                        ldb: usize,
                        c: &mut [$t],
                        ldc: usize,
                    ) {
                        chain::<$t, { $nr }>(k, a, lda, b, ldb, c, ldc);
                    }
                    #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,fma")]
                    fn avx512(
                        k: usize,
                        a: &[$t],
                        lda: usize,
                        b: &[$t],
                        ldb: usize,
                        c: &mut [$t],
                        ldc: usize,
                    ) {
                        chain::<$t, { $nr }>(k, a, lda, b, ldb, c, ldc);
                    }
                    match isa {
                        Isa::Portable => {}
                        // SAFETY: an `Isa` other than `Portable` comes from `Isa::available`, which asked the machine.
                        Isa::Avx2 => return unsafe { avx2(k, a, lda, b, ldb, c, ldc) },
                        // SAFETY: as above.
                        Isa::Avx512 | Isa::Avx512Bf16 => {
                            return unsafe { avx512(k, a, lda, b, ldb, c, ldc) }
                        }
                    }
                }
                let _ = isa;
                chain::<$t, { $nr }>(k, a, lda, b, ldb, c, ldc);
            }
        }
    };
}
real!(f32, "float32", 48);
real!(f64, "float64", 24);

/// `c[i][j] += sum_k a[k][i] * b[k][j]` for `MR` x `T::NR` entries; `lda`, `ldb`, `ldc` are the row strides.
pub fn tile<T: Real>(
    isa: Isa,
    k: usize,
    a: &[T],
    lda: usize,
    b: &[T],
    ldb: usize,
    c: &mut [T],
    ldc: usize,
) {
    T::run_tile(isa, k, a, lda, b, ldb, c, ldc);
}

#[inline(always)]
fn chain<T: Real, const N: usize>(
    k: usize,
    a: &[T],
    lda: usize,
    b: &[T],
    ldb: usize,
    c: &mut [T],
    ldc: usize,
) {
    for (half, rows) in [(0, 4), (4, 4)] {
        let mut acc = [[T::default(); N]; 4];
        for (i, row) in acc.iter_mut().enumerate().take(rows) {
            row.copy_from_slice(&c[(half + i) * ldc..][..N]);
        }
        for p in 0..k {
            let x = &a[p * lda + half..][..4];
            let y = &b[p * ldb..][..N];
            for (row, &x) in acc.iter_mut().zip(x) {
                for (entry, &y) in row.iter_mut().zip(y) {
                    *entry = x.fma(y, *entry);
                }
            }
        }
        for (i, row) in acc.iter().enumerate().take(rows) {
            c[(half + i) * ldc..][..N].copy_from_slice(row);
        }
    }
}
