//! Rows of a matrix added to eight vectors at a time.
#![allow(unsafe_code)] // calls of functions whose instructions an `Isa` has shown to exist

use super::Isa;

/// `to[k] += sum_i rows[i][k] * by[i]` in eight lanes. Each entry is one chain of fused multiply-adds with `i`
/// ascending, so the bits are the same on every instruction set and for any division of the rows among calls.
///
/// # Panics
/// Where a row is shorter than `to`, or `rows` and `by` differ in number.
pub(crate) fn add_rows(isa: Isa, to: &mut [[f64; 8]], rows: &[&[f64]], by: &[[f64; 8]]) {
    let done = match isa.level() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: only `Isa::available` makes values above `PORTABLE`, after testing the machine.
        2 => unsafe { super::x86::rows_avx2(to, rows, by) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        3.. => unsafe { super::x86::rows_avx512(to, rows, by) },
        _ => 0,
    };
    assert!(rows.len() == by.len());
    for (k, lanes) in to.iter_mut().enumerate().skip(done) {
        for (row, by) in rows.iter().zip(by) {
            let s = row[k];
            for (entry, by) in lanes.iter_mut().zip(by) {
                *entry = s.mul_add(*by, *entry);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{add_rows, Isa};

    type Lane = [f64; 8];

    #[test]
    fn every_instruction_set_has_the_bits_of_chains_one_by_one() {
        let number = |i: usize| ((i * 2_654_435_761) % 1_000_003) as f64 / 997.0 - 501.0;
        for n_rows in [0, 1, 7, 64] {
            for n in [0, 1, 3, 4, 15, 16, 33, 65] {
                let matrix: Vec<Vec<f64>> =
                    (0..n_rows).map(|i| (0..n).map(|k| number(i * 131 + k)).collect()).collect();
                let rows: Vec<&[f64]> = matrix.iter().map(Vec::as_slice).collect();
                let by: Vec<Lane> =
                    (0..n_rows).map(|i| std::array::from_fn(|r| number(i * 8 + r + 7))).collect();
                let start: Vec<Lane> = (0..n).map(|k| [number(k); 8]).collect();
                let mut expected = start.clone();
                for (row, by) in rows.iter().zip(&by) {
                    for k in 0..n {
                        for r in 0..8 {
                            expected[k][r] = row[k].mul_add(by[r], expected[k][r]);
                        }
                    }
                }
                for isa in Isa::available() {
                    let mut found = start.clone();
                    add_rows(isa, &mut found, &rows, &by);
                    assert_eq!(found, expected, "{} rows of {n}, {}", n_rows, isa.name());
                }
            }
        }
    }
}
