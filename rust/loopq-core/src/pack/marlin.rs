//! The Marlin layout of 4-bit symmetric codes. Only kernels have it: no file of loopq does.
//!
//! `W` is seen as `K` x `N` (inputs x outputs); codes come row-major as (outputs, inputs), the way they are solved.
//! `K` is a multiple of 16 and `N` of 64, padded with code 8 (the value 0). Words form a `(K/16) x (2N)` array of
//! int32. Nibble `p` of a word is bits `4p .. 4p+3`. Entry `(k, n)` is in
//!
//! ```text
//! word(k, n)   = (k >> 4) * 2N + (n >> 6) * 128 + (4 * (n & 7) + ((k & 7) >> 1)) * 4 + ((n >> 4) & 3)
//! nibble(k, n) = 2 * ((n >> 3) & 1) + ((k >> 3) & 1) + 4 * (k & 1)
//! ```
//!
//! Scales are stored `(G, N)`. A matrix with `K = g` counts as one scale per output. Output `n` is at
//!
//! ```text
//! more than one group:  (n & ~63) + 8 * (n & 7) + ((n & 63) >> 3)
//! one group:            (n & ~31) + 8 * ((n & 7) >> 1) + 2 * ((n & 31) >> 3) + (n & 1)
//! ```

use crate::memory::zeros;
use crate::pack::{check_codes, fold_row, interleave, separate, unfold_row};
use crate::simd::{per_isa, Isa};
use crate::{dims, Error, Result};

fn check(k: usize, n: usize) -> Result<()> {
    if !k.is_multiple_of(16) || k == 0 {
        return Err(Error::setting("inputs (K)", k, "a multiple of 16: pad with zero codes"));
    }
    if !n.is_multiple_of(64) || n == 0 {
        return Err(Error::setting("outputs (N)", n, "a multiple of 64: pad with zero codes"));
    }
    Ok(())
}

/// Inputs and outputs of a tile of 128 words.
const TILE_K: usize = 16;
const TILE_N: usize = 64;
const TILE_WORDS: usize = TILE_K * TILE_N / 8;

/// Word of a tile for inputs `2 * pair` and `2 * pair + 8` (two each) and outputs `strip * 16 + r` and 8 beyond.
#[inline(always)]
fn place(r: usize, pair: usize, strip: usize) -> usize {
    (4 * r + pair) * 4 + strip
}

/// Packs biased 4-bit codes (N, K) to `(K / 16, 2 N)` words.
pub fn pack(codes: &[u8], k: usize, n: usize) -> Result<Vec<u32>> {
    check(k, n)?;
    dims::check_matrix("codes", codes, n, k)?;
    check_codes(codes, k, 4, 0)?;
    let mut out = zeros("packed codes", dims::product("packed codes", k / TILE_K, 2 * n)?)?;
    pack_marlin(Isa::best(), codes, k, &mut out);
    Ok(out)
}

per_isa! {
    /// Packs whole tiles of `k` inputs.
    fn pack_marlin(codes: &[u8], k: usize, out: &mut [u32]) = pack_body;
}
per_isa! {
    /// The inverse of [`pack_marlin`].
    fn unpack_marlin(packed: &[u32], k: usize, out: &mut [u8]) = unpack_body;
}

#[inline(always)]
fn pack_body(codes: &[u8], k: usize, out: &mut [u32]) {
    let n_words = codes.len() / k * 2;
    for (band, codes) in codes.chunks_exact(TILE_N * k).enumerate() {
        for step in 0..k / TILE_K {
            let tile = &mut out[step * n_words + band * TILE_WORDS..][..TILE_WORDS];
            for r in 0..8 {
                // Loops, not closures: a closure that is not inlined has none of the caller's instructions.
                let mut strips = [[0; 4]; 4];
                for (s, words) in strips.iter_mut().enumerate() {
                    let (low, high) =
                        ((s * 16 + r) * k + step * TILE_K, (s * 16 + r + 8) * k + step * TILE_K);
                    *words =
                        interleave(fold_row(&codes[low..][..TILE_K]), fold_row(&codes[high..][..TILE_K]));
                }
                for pair in 0..4 {
                    for (strip, words) in strips.iter().enumerate() {
                        tile[place(r, pair, strip)] = words[pair];
                    }
                }
            }
        }
    }
}

/// The inverse of [`pack`].
pub fn unpack(packed: &[u32], k: usize, n: usize) -> Result<Vec<u8>> {
    check(k, n)?;
    dims::check_matrix("packed codes", packed, k / TILE_K, dims::product("packed codes", 2, n)?)?;
    let mut out = zeros("codes", dims::product("codes", k, n)?)?;
    unpack_marlin(Isa::best(), packed, k, &mut out);
    Ok(out)
}

#[inline(always)]
fn unpack_body(packed: &[u32], k: usize, out: &mut [u8]) {
    let n_words = out.len() / k * 2;
    for (band, codes) in out.chunks_exact_mut(TILE_N * k).enumerate() {
        for step in 0..k / TILE_K {
            let tile = &packed[step * n_words + band * TILE_WORDS..][..TILE_WORDS];
            for r in 0..8 {
                for strip in 0..4 {
                    let mut words = [0; 4];
                    for (pair, word) in words.iter_mut().enumerate() {
                        *word = tile[place(r, pair, strip)];
                    }
                    let [low, high] = separate(words);
                    unfold_row(low, &mut codes[(strip * 16 + r) * k + step * TILE_K..][..TILE_K]);
                    unfold_row(high, &mut codes[(strip * 16 + r + 8) * k + step * TILE_K..][..TILE_K]);
                }
            }
        }
    }
}

/// Where the scale of output `n` is stored in its row of scales. One scale per output and one per group differ.
#[inline]
fn scale_place(n: usize, per_channel: bool) -> usize {
    if per_channel {
        (n & !31) + 8 * ((n & 7) >> 1) + 2 * ((n & 31) >> 3) + (n & 1)
    } else {
        (n & !63) + 8 * (n & 7) + ((n & 63) >> 3)
    }
}

/// Scales (N, G) to the stored order (G, N).
pub fn pack_scales(scales: &[f32], n: usize, n_groups: usize) -> Result<Vec<f32>> {
    check(16, n)?;
    dims::check_matrix("scales", scales, n, n_groups)?;
    let mut out = zeros("scales", scales.len())?;
    for row in 0..n {
        for g in 0..n_groups {
            out[g * n + scale_place(row, n_groups == 1)] = scales[row * n_groups + g];
        }
    }
    Ok(out)
}

/// The inverse of [`pack_scales`].
pub fn unpack_scales(packed: &[f32], n: usize, n_groups: usize) -> Result<Vec<f32>> {
    check(16, n)?;
    dims::check_matrix("scales", packed, n_groups, n)?;
    let mut out = zeros("scales", packed.len())?;
    for row in 0..n {
        for g in 0..n_groups {
            out[row * n_groups + g] = packed[g * n + scale_place(row, n_groups == 1)];
        }
    }
    Ok(out)
}
