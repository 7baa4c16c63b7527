//! One row of the search.

use crate::simd::{per_isa, Isa};

/// Name of the search's memory in errors.
pub(super) const SCRATCH: &str = "paths through a trellis";

/// A row that all paths go through, with the next one in mind.
pub(super) struct Row<'a> {
    /// Place in the search.
    pub(super) at: usize,
    pub(super) scale: f32,
    pub(super) target: f32,
    /// Root of the row's pivot.
    pub(super) root: f32,
    /// Coupling of the next row with those from the first coupled one to this. Empty where none is.
    pub(super) coupling: &'a [f32],
    /// Target of the next row's value before all errors.
    pub(super) wanted: f32,
    /// Root of the next row's pivot.
    pub(super) next_root: f32,
    /// Whether every path stays open, near the end, where the cheapest may not lead to it.
    pub(super) all: bool,
}

/// The first node of least cost.
pub(super) fn best(isa: Isa, keys: &[u32]) -> usize {
    let least = least(isa, keys);
    keys.iter().position(|&key| key == least).unwrap_or(0)
}

per_isa! {
    fn least(keys: &[u32]) -> u32 = least_body;
}

#[inline(always)]
fn least_body(keys: &[u32]) -> u32 {
    keys.iter().copied().fold(u32::MAX, u32::min)
}
