//! Keys and values as codes of eight or four bits: blocks of 32 channels of a head, a bfloat16 scale before each.
//!
//! Some channels of keys are much larger than others. Before they become four bits, keys and values are multiplied by a
//! Hadamard matrix, which spreads a channel over all of a head. Queries are multiplied by it too, so products stay the
//! same; results are transformed back.

use super::transform::butterflies;
use super::vector::Rows;

/// Channels of a block; the last one of a head may have fewer.
const BLOCK: usize = 32;
/// Bytes of a scale.
const SCALE: usize = 2;

/// Rows of codes of `BITS` bits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Coded<'a, const BITS: usize>(pub(super) &'a [u8]);

impl<const BITS: usize> Coded<'_, BITS> {
    /// Lowest code; the highest is one less without its sign.
    const LOWEST: f32 = -((1 << (BITS - 1)) as f32);

    /// Bytes of a row. A head has an even number of channels.
    pub(super) fn bytes(head: usize) -> usize {
        head.div_ceil(BLOCK) * SCALE + head * BITS / 8
    }

    /// Adds a row. The number of the largest magnitude in a block has the lowest code, so a scale may be negative.
    pub(super) fn push(to: &mut Vec<u8>, x: &[f32]) {
        for x in x.chunks(BLOCK) {
            let larger = |end: f32, &v: &f32| if v.abs() > end.abs() || !v.is_finite() { v } else { end };
            // NaN in a block makes the whole block NaN.
            let end = x.iter().fold(0.0, larger);
            let end = if end.is_finite() { end } else { f32::NAN };
            let scale = half::bf16::from_f32(end / Self::LOWEST);
            to.extend(scale.to_le_bytes());
            let by = match scale.to_f32() {
                0.0 => 0.0,
                scale => 1.0 / scale,
            };
            let code =
                |v: f32| ((v * by).round_ties_even().clamp(Self::LOWEST, -1.0 - Self::LOWEST) as i8) as u8;
            if BITS == 8 {
                to.extend(x.iter().map(|&v| code(v)));
            } else {
                let (low, high) = x.split_at(x.len() / 2);
                to.extend(low.iter().zip(high).map(|(&l, &h)| (code(l) & 15) | code(h) << 4));
            }
        }
    }
}

/// Multiplies a head by an orthogonal matrix that is its own inverse: Hadamard's, in parts of the largest power of two
/// that divides the head.
pub(super) fn turn(x: &mut [f32]) {
    let part = 1 << x.len().trailing_zeros();
    let by = 1.0 / (part as f32).sqrt();
    for x in x.chunks_exact_mut(part) {
        butterflies(x, 1);
        for v in x.iter_mut() {
            *v *= by;
        }
    }
}

impl<const BITS: usize> Rows for Coded<'_, BITS> {
    #[inline(always)]
    fn row<'b>(&'b self, i: usize, room: &'b mut [f32]) -> &'b [f32] {
        let bytes = Self::bytes(room.len());
        let mut row = &self.0[i * bytes..(i + 1) * bytes];
        for out in room.chunks_mut(BLOCK) {
            let (scale, rest) = row.split_at(SCALE);
            let scale = f32::from_bits(u32::from(u16::from_le_bytes([scale[0], scale[1]])) << 16);
            let (codes, rest) = rest.split_at(out.len() * BITS / 8);
            row = rest;
            if BITS == 8 {
                for (out, &code) in out.iter_mut().zip(codes) {
                    *out = f32::from(code as i8) * scale;
                }
            } else {
                let (low, high) = out.split_at_mut(out.len() / 2);
                for (low, &code) in low.iter_mut().zip(codes) {
                    *low = f32::from((code << 4) as i8 >> 4) * scale;
                }
                for (high, &code) in high.iter_mut().zip(codes) {
                    *high = f32::from(code as i8 >> 4) * scale;
                }
            }
        }
        room
    }
}

#[cfg(test)]
mod tests {
    use super::super::vector::Rows;
    use super::{turn, Coded};

    fn back<const BITS: usize>(x: &[f32]) -> Vec<f32> {
        let mut stored = Vec::new();
        Coded::<BITS>::push(&mut stored, &[1.0; 40]);
        Coded::<BITS>::push(&mut stored, x);
        assert_eq!(stored.len(), 2 * Coded::<BITS>::bytes(x.len()));
        Coded::<BITS>(&stored).row(1, &mut vec![0.0; x.len()]).to_vec()
    }

    #[test]
    fn a_number_is_off_by_half_a_step_of_its_block() {
        let x: Vec<f32> =
            (0..40).map(|i| (i as f32 * 0.7).sin() * if i < 32 { 1.0 } else { 100.0 }).collect();
        for (found, steps) in [(back::<8>(&x), 128.0), (back::<4>(&x), 8.0)] {
            for (i, (found, x)) in found.iter().zip(&x).enumerate() {
                // The opposite end may lack a code: it is off by a whole step.
                let step = if i < 32 { 1.0 } else { 100.0 } / steps;
                assert!((found - x).abs() <= 1.01 * step, "{i}: {found}, not {x}");
            }
        }
    }

    #[test]
    fn turned_twice_a_head_is_as_before_and_once_as_long() {
        for n in [6, 40, 64] {
            let x: Vec<f32> = (0..n).map(|i| (i as f32 * 0.7).sin()).collect();
            let mut turned = x.clone();
            turn(&mut turned);
            let length = |x: &[f32]| x.iter().map(|v| v * v).sum::<f32>();
            assert!((length(&turned) - length(&x)).abs() < 1e-4 && turned != x);
            turn(&mut turned);
            assert!(turned.iter().zip(&x).all(|(a, b)| (a - b).abs() < 1e-6));
        }
    }

    #[test]
    fn nothing_stays_nothing_and_ends_have_both_signs() {
        assert_eq!(back::<4>(&[0.0; 40]), [0.0; 40]);
        for end in [8.0, -8.0] {
            let mut x = [end / 4.0; 40];
            (x[3], x[39]) = (end, end);
            assert_eq!(back::<4>(&x), x);
            assert_eq!(back::<8>(&x), x);
        }
    }

    #[test]
    fn what_is_no_number_stays_none() {
        let mut x = [1.0; 40];
        x[35] = f32::NAN;
        x[3] = f32::INFINITY;
        let found = back::<4>(&x);
        assert!(found.iter().any(|v| !v.is_finite()), "{found:?}");
    }
}
