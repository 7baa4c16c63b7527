//! Inner products of many short vectors with one.
#![allow(unsafe_code)] // calls of functions whose instructions an `Isa` has shown to exist

use super::operands::Short;
use super::Isa;

/// `out[i] = rows[i] . by`, nothing fused, summed in pairs of neighbours: the same bits on every instruction set.
///
/// # Panics
/// Where `rows` and `out` differ in number.
pub(crate) fn dots(isa: Isa, rows: &[Short], by: &Short, out: &mut [f32]) {
    assert!(rows.len() == out.len());
    let done = match isa.level() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `Isa::available` makes values above `PORTABLE`, after testing the machine.
        2.. => unsafe { super::x86::dots_avx2(rows, by, out) },
        _ => 0,
    };
    for (row, out) in rows.iter().zip(out).skip(done) {
        let product: [f32; 8] = std::array::from_fn(|i| row.0[i] * by.0[i]);
        let pairs: [f32; 4] = std::array::from_fn(|i| product[2 * i] + product[2 * i + 1]);
        *out = (pairs[0] + pairs[1]) + (pairs[2] + pairs[3]);
    }
}

#[cfg(test)]
mod tests {
    use super::{dots, Isa, Short};

    #[test]
    fn every_instruction_set_has_the_bits_of_the_loop() {
        let number = |i: usize| ((i * 2_654_435_761) % 1_000_003) as f32 / 997.0 - 501.0;
        let by = Short(std::array::from_fn(|i| number(i + 7)));
        for n in [0, 1, 3, 4, 5, 16, 33] {
            let rows: Vec<Short> =
                (0..n).map(|r| Short(std::array::from_fn(|i| number(r * 8 + i)))).collect();
            let mut expected = vec![0.0; n];
            dots(Isa::PORTABLE, &rows, &by, &mut expected);
            for (row, sum) in rows.iter().zip(&expected) {
                let exact: f64 = row.0.iter().zip(&by.0).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                assert!((f64::from(*sum) - exact).abs() < 1e-6 * 8.0 * 501.0 * 501.0);
            }
            for isa in Isa::available() {
                let mut found = vec![0.0; n];
                dots(isa, &rows, &by, &mut found);
                assert_eq!(found, expected, "{n} rows, {}", isa.name());
            }
        }
    }
}
