//! Where sixteen rows of a record find their states.

use super::layout::{LANES, LINE};
use loopq_core::grid::Trellis;

/// How sixteen rows find their states in sixteen bytes, and what keeps them.
pub(super) struct Windows {
    /// For each of 64 bytes, of which row by row four are a number, the byte that goes there.
    pub(super) bytes: [u8; LINE],
    /// How far each number is shifted down.
    pub(super) shifts: [u32; LANES],
    /// The bits of a state.
    pub(super) mask: u32,
}

impl Windows {
    pub(super) fn new(trellis: Trellis) -> Self {
        let bit = |lane: usize| (LANES - 1 - lane) * trellis.bits() as usize;
        Self {
            bytes: std::array::from_fn(|i| (bit(i / 4) / 8 + i % 4) as u8),
            shifts: std::array::from_fn(|lane| (bit(lane) % 8) as u32),
            mask: (1 << trellis.state_bits()) - 1,
        }
    }
}
