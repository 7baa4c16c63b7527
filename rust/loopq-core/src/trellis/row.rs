//! One row of the search, and how many rows are coupled with it.

/// Name of the search's memory in errors.
pub(super) const SCRATCH: &str = "paths through a trellis";
/// Number of a path's last errors that are kept per path.
pub(super) const WINDOW: usize = 64;

/// A row that all paths go through, with the next one in mind.
pub(super) struct Row {
    /// Place in the search.
    pub(super) at: usize,
    pub(super) scale: f32,
    pub(super) target: f32,
    /// Root of the row's pivot.
    pub(super) root: f32,
    /// Coupling of the next row with those in the window, by slot.
    pub(super) coupling: [f32; WINDOW],
    /// Target of the next row's value before the errors in the window.
    pub(super) wanted: f32,
    /// Root of the next row's pivot.
    pub(super) next_root: f32,
    /// Whether every path stays open, near the end, where the cheapest may not lead to it.
    pub(super) all: bool,
}
