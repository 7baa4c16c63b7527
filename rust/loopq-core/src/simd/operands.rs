//! Operands of the numeric loops: sizes that all instruction sets share, and the check of strided slices.

/// Rows of a tile.
pub const MR: usize = 8;

/// Rows in one chain of a sum of bf16 products.
pub(crate) const CHAIN: usize = 16;

/// Eight numbers: half a line of the cache, and never parts of two.
#[derive(Clone, Copy)]
#[repr(align(32))]
pub(crate) struct Short(pub(crate) [f32; 8]);

/// Checks that strided operands lie inside their slices.
#[inline(always)]
pub(super) fn check<A, B, C>(
    k: usize,
    a: &[A],
    lda: usize,
    b: &[B],
    ldb: usize,
    c: &[C],
    ldc: usize,
    nr: usize,
) {
    assert!(holds(a.len(), k, lda, MR) && holds(b.len(), k, ldb, nr) && holds(c.len(), MR, ldc, nr));
    assert!(lda >= MR && ldb >= nr && ldc >= nr);
}

/// Whether a slice holds `rows` rows of `width`, `stride` apart. No product may wrap, since the caller of a tile
/// chooses all of these.
#[inline(always)]
fn holds(len: usize, rows: usize, stride: usize, width: usize) -> bool {
    let last = rows.checked_sub(1).map(|last| last.checked_mul(stride).and_then(|at| at.checked_add(width)));
    last.is_none_or(|end| end.is_some_and(|end| end <= len))
}
