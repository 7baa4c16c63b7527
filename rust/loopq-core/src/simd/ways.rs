//! The cheapest ways into the nodes of a trellis.
#![allow(unsafe_code)] // calls of functions whose instructions an `Isa` has shown to exist

use super::operands::{Ways, CODES, NODES};
use super::Isa;

/// Writes the least `keys[from] + (scale * value - wanted[from])^2` of each node, with the first code of its way in the
/// last bits. Ways with first code `f` and last code `l` go from node `f * apart + i` to `digits * i + l`, with `apart` a
/// whole number of [`NODES`]. Nothing is fused or reordered: the same bits on every instruction set.
///
/// # Panics
/// Where sizes do not fit.
pub(crate) fn cheapest(isa: Isa, ways: &Ways, next: &mut [u32]) {
    let (nodes, digits) = (ways.keys.len(), ways.digits);
    assert!(digits.is_power_of_two() && digits % CODES == 0 && nodes % (digits * NODES) == 0);
    assert!(ways.wanted.len() == nodes && next.len() == nodes && ways.values.len() == nodes * digits);
    match isa.level() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `Isa::available` makes values above `PORTABLE`, after testing the machine; sizes are as asserted.
        2.. => unsafe { super::x86::cheapest_avx2(ways, next) },
        _ => plain(ways, next),
    }
}

fn plain(ways: &Ways, next: &mut [u32]) {
    let (digits, mask, apart) = (ways.digits, ways.digits as u32 - 1, ways.keys.len() / ways.digits);
    let values = ways.values.chunks_exact(digits * digits * NODES);
    for ((block, next), values) in next.chunks_exact_mut(digits * NODES).enumerate().zip(values) {
        for (group, values) in values.chunks_exact(digits * CODES * NODES).enumerate() {
            let mut least = [[u32::MAX; NODES]; CODES];
            for (first, values) in values.chunks_exact(CODES * NODES).enumerate() {
                let from = first * apart + block * NODES;
                let (keys, wanted) = (&ways.keys[from..][..NODES], &ways.wanted[from..][..NODES]);
                for (least, values) in least.iter_mut().zip(values.chunks_exact(NODES)) {
                    for (i, least) in least.iter_mut().enumerate() {
                        let d = ways.scale * values[i] - wanted[i];
                        let cost = f32::from_bits(keys[i] & !mask) + d * d;
                        *least = (*least).min(cost.to_bits() & !mask | first as u32);
                    }
                }
            }
            for (code, least) in least.iter().enumerate() {
                for (i, &least) in least.iter().enumerate() {
                    next[i * digits + group * CODES + code] = least;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{cheapest, Isa, Ways, CODES, NODES};

    #[test]
    fn every_instruction_set_has_the_bits_of_the_loop() {
        let number = |i: usize| ((i * 2_654_435_761) % 1_000_003) as f32 / 250_000.75 - 2.0;
        for (digits, apart) in [(4, 8), (4, 32), (8, 16), (16, 8)] {
            let nodes: usize = digits * apart;
            let keys: Vec<u32> = (0..nodes)
                .map(|i| if i % 5 == 0 { f32::INFINITY.to_bits() } else { number(i).abs().to_bits() })
                .collect();
            let wanted: Vec<f32> = (0..nodes).map(|i| number(i + 3)).collect();
            let values: Vec<f32> = (0..nodes * digits).map(|i| number(i + 11)).collect();
            let ways = Ways { keys: &keys, wanted: &wanted, values: &values, scale: 0.7, digits };
            let mask = digits as u32 - 1;
            let way = |first: usize, to: usize| {
                let (i, last) = (to / digits, to % digits);
                let outer = (i / NODES * digits / CODES + last / CODES) * digits + first;
                let value = values[(outer * CODES + last % CODES) * NODES + i % NODES];
                let (key, d) = (keys[first * apart + i], 0.7 * value - wanted[first * apart + i]);
                (f32::from_bits(key & !mask) + d * d).to_bits() & !mask | first as u32
            };
            let expected: Vec<u32> =
                (0..nodes).map(|to| (0..digits).map(|f| way(f, to)).min().unwrap_or(0)).collect();
            for isa in Isa::available() {
                let mut next = vec![0; nodes];
                cheapest(isa, &ways, &mut next);
                assert_eq!(next, expected, "{digits} codes, {}", isa.name());
            }
        }
    }
}
