//! Where the rows of a panel find their states in a record.

use std::array::from_fn;

use super::layout::{LANES, LINE};
use loopq_core::grid::Trellis;

/// How the 32 rows of a panel find their states in its bytes of a record, and what keeps them.
///
/// Row 31 has the lowest bits. The first sixteen rows begin [`half_of`] bytes further.
pub(super) struct Windows {
    /// The bits of a state.
    pub(super) mask: u32,
    /// For sixteen rows: of each number of four bytes, which of sixteen bytes goes there.
    pub(super) bytes: [u8; LINE],
    /// How far each number is shifted down.
    pub(super) shifts: [u32; LANES],
    /// For eight numbers that each hold the states of four rows: bytes, as above.
    pub(super) fours: [u8; LINE / 2],
    /// How far each of these is shifted down to the last of its rows.
    pub(super) four_shifts: [u32; LANES / 2],
    /// For sixteen rows: at which bit of their eight bytes each byte of a number begins. Four bits: of eight rows in
    /// either half of sixteen bytes.
    pub(super) starts: [u8; LINE],
}

/// Bytes that sixteen rows take.
pub(super) const fn half_of(bits: u32) -> usize {
    LANES * bits as usize / 8
}

impl Windows {
    pub(super) fn new(trellis: Trellis) -> Self {
        let bits = trellis.bits() as usize;
        let bit = |lane: usize| (LANES - 1 - lane) * bits;
        // Sixteen rows lie in each half of eight numbers.
        let four = |lane: usize| (3 - lane % 4) * 4 * bits;
        let start = |lane: usize| if bits == 4 { (7 - (lane / 4 * 2 + lane % 2)) * bits } else { bit(lane) };
        Self {
            mask: (1 << trellis.state_bits()) - 1,
            bytes: from_fn(|i| (bit(i / 4) / 8 + i % 4) as u8),
            shifts: from_fn(|lane| (bit(lane) % 8) as u32),
            fours: from_fn(|i| (four(i / 4) / 8 + i % 4) as u8),
            four_shifts: from_fn(|lane| (four(lane) % 8) as u32),
            // Bytes above a state may begin anywhere: they are masked.
            starts: from_fn(|i| ((start(i / 4) + i % 4 * 8) % 64) as u8),
        }
    }
}
