//! Operands of the numeric loops: sizes that all instruction sets share, and the check of strided slices.

/// Rows of a tile.
pub const MR: usize = 8;

/// Rows in one chain of a sum of bf16 products.
pub(crate) const CHAIN: usize = 16;

/// Eight numbers: half a line of the cache, and never parts of two.
#[derive(Clone, Copy)]
#[repr(align(32))]
pub(crate) struct Short(pub(crate) [f32; 8]);

/// Nodes that are gone through together.
pub(crate) const NODES: usize = 8;
/// Last codes that are gone through together: with more, the least costs would not stay in registers.
pub(crate) const CODES: usize = 4;

/// One step of a search from nodes to nodes, `digits` ways into and out of each.
pub(crate) struct Ways<'a> {
    /// Costs, by node. Their last bits are ignored, those that hold a code.
    pub(crate) keys: &'a [u32],
    /// Wanted value over the scale's root, by node.
    pub(crate) wanted: &'a [f32],
    /// Value of each way, in the order of the loops: [`NODES`] nodes, [`CODES`] last codes, first code, last code among
    /// these, node among those.
    pub(crate) values: &'a [f32],
    pub(crate) scale: f32,
    /// A power of two.
    pub(crate) digits: usize,
}

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
