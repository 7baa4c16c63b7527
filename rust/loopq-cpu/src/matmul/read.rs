//! Measures this machine's reading speed, the bound on the speed of a product.

use std::sync::atomic::{AtomicU64, Ordering};

use super::share;
use loopq_core::simd::{per_isa, Isa};
use loopq_core::{Execution, Result};

/// Cache lines that are added up side by side, so that no addition waits for another.
const STEP: usize = 8;

/// Reads all bytes `repeats` times, each thread always the same part, and gives the sum of their 64-bit words.
pub fn read(bytes: &[u8], repeats: usize, execution: &Execution<'_>) -> Result<u64> {
    let (words, _) = bytes.as_chunks::<8>();
    let total = AtomicU64::new(0);
    let isa = Isa::best();
    share(words.len(), execution, |range| {
        for _ in 0..repeats {
            if execution.check().is_err() {
                return;
            }
            let sum = sum(isa, std::hint::black_box(&words[range.clone()]));
            total.fetch_add(sum, Ordering::Relaxed);
        }
    })?;
    execution.check()?;
    Ok(total.into_inner())
}

per_isa! {
    /// Wrapping sum.
    fn sum(words: &[[u8; 8]]) -> u64 = sum_body;
}

#[inline(always)]
fn sum_body(words: &[[u8; 8]]) -> u64 {
    let mut sums = [0_u64; 8 * STEP];
    let (chunks, rest) = words.as_chunks::<{ 8 * STEP }>();
    for chunk in chunks {
        for (sum, word) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(u64::from_le_bytes(*word));
        }
    }
    let rest = rest.iter().fold(0_u64, |sum, word| sum.wrapping_add(u64::from_le_bytes(*word)));
    sums.iter().fold(rest, |sum, &s| sum.wrapping_add(s))
}
