//! Codes on a bitshift trellis (A. Tseng et al., *QTIP*, 2024, arXiv:2406.11235). Format: `docs/formats/trellis.md`.
//!
//! The codes of a column are cyclic streams of `bits` bits a row, one stream for each run of rows. A row's state is the
//! last `state_bits` bits of its stream up to its own code, and its value is a function of the state alone. So any row
//! is decoded by a shift, a mask and that function, and a weight takes `bits` bits at any number of states.

use crate::memory::{collected, zeros};
use crate::{dims, Error, Result};

/// How codes stand for values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trellis {
    bits: u32,
    state_bits: u32,
    stream_rows: usize,
}

impl Trellis {
    /// A trellis with streams of `stream_rows` rows. Allowed: 2 to 4 `bits` a row, and `state_bits` from `bits + 2` to
    /// 16.
    pub fn new(bits: u32, state_bits: u32, stream_rows: usize) -> Result<Self> {
        if !(2..=4).contains(&bits) {
            return Err(Error::setting("bits", bits, "2, 3, 4 on a trellis"));
        }
        if !(bits + 2..=16).contains(&state_bits) {
            let allowed = format!("{} to 16 with {bits} bits", bits + 2);
            return Err(Error::setting("state_bits", state_bits, allowed));
        }
        if stream_rows == 0 {
            return Err(Error::setting("stream_rows", stream_rows, "1 or more"));
        }
        Ok(Self { bits, state_bits, stream_rows })
    }

    /// Bits of a code.
    #[inline]
    #[must_use]
    pub fn bits(self) -> u32 {
        self.bits
    }

    /// Bits of a state.
    #[inline]
    #[must_use]
    pub fn state_bits(self) -> u32 {
        self.state_bits
    }

    /// Rows that a stream runs over.
    #[inline]
    #[must_use]
    pub fn stream_rows(self) -> usize {
        self.stream_rows
    }

    /// States.
    pub(crate) fn states(self) -> usize {
        1 << self.state_bits
    }

    /// Codes.
    pub(crate) fn digits(self) -> usize {
        1 << self.bits
    }

    /// States that go on to one state, but for their first code: those of all bits but a code's.
    pub(crate) fn low(self) -> usize {
        1 << (self.state_bits - self.bits)
    }

    /// The states of a stream, from its codes alone.
    pub(crate) fn states_of(
        self,
        codes: impl ExactSizeIterator<Item = u8> + Clone,
    ) -> impl Iterator<Item = usize> {
        let (mask, rows) = (self.states() - 1, codes.len());
        // A stream that is shorter than a state is gone round more than once.
        let before = (self.state_bits.div_ceil(self.bits) as usize).next_multiple_of(rows.max(1));
        let push = move |state: &mut usize, code: u8| {
            *state = (*state << self.bits | usize::from(code)) & mask;
            Some(*state)
        };
        codes.cycle().take(before + rows).scan(0, push).skip(before)
    }
}

/// Factor that mixes a state before its bytes are summed.
pub const FACTOR: u32 = 34_038_481;
/// Addend of the mixture.
pub const OFFSET: u32 = 76_625_530;

/// A state mixed into four bytes.
#[inline]
#[must_use]
pub fn mix(state: u32) -> u32 {
    state.wrapping_mul(FACTOR).wrapping_add(OFFSET)
}

/// The value of a state: the sum of the bytes of the mixed state, less 510, over 128.
///
/// Nearly normal with a deviation of 1.155, as weights are, and exact in half precision.
#[inline]
#[must_use]
pub fn value(state: u32) -> f32 {
    let sum: i32 = mix(state).to_le_bytes().into_iter().map(i32::from).sum();
    (sum - 510) as f32 / 128.0
}

/// `value * scale` for every entry, in float32.
///
/// # Errors
/// Shapes that do not fit, a code that is too large.
pub fn decode(
    trellis: Trellis,
    codes: &[u8],
    scales: &[f32],
    [rows, dim]: [usize; 2],
    group: usize,
) -> Result<Vec<f32>> {
    let (group, stream_rows) = (group.max(1), trellis.stream_rows);
    dims::check_matrix("codes", codes, rows, dim)?;
    let n_groups = dim.div_ceil(group);
    dims::check_matrix("scales", scales, rows, n_groups)?;
    if let Some(at) = codes.iter().position(|&c| usize::from(c) >= trellis.digits()) {
        let (row, column, value) = (at / dim, at % dim, i64::from(codes[at]));
        return Err(Error::CodeRange { row, column, value, bits: trellis.bits, zero_offset: 0 });
    }
    let table: Vec<f32> = collected("values of states", (0..trellis.states()).map(|x| value(x as u32)))?;
    let mut out: Vec<f32> = zeros("values", codes.len())?;
    for first in (0..rows).step_by(stream_rows) {
        let stream = first..rows.min(first + stream_rows);
        for j in 0..dim {
            let states = trellis.states_of(stream.clone().map(|r| codes[r * dim + j]));
            for (r, state) in stream.clone().zip(states) {
                out[r * dim + j] = table[state] * scales[r * n_groups + j / group];
            }
        }
    }
    Ok(out)
}
