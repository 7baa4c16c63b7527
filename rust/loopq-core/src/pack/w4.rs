//! The layout `lq-w4` that the int4 kernel reads. Spec: `kernels/README.md`; twin: `loopq.runtime.cuda.layout`.
//!
//! `W` is N x K (outputs x inputs). A strip is 16 outputs, and a tile is 16 outputs x 64 inputs in 128 words. All tiles
//! of a strip follow each other. A short last tile is padded with the code of zero.

use rayon::prelude::*;

use crate::memory::zeros;
use crate::pack::{check_codes, fold_row, interleave, separate, unfold_row};
use crate::{dims, Error, Execution, Result};

/// Outputs of a strip.
pub const STRIP: usize = 16;
/// Inputs of a tile.
pub const TILE: usize = 64;
/// Words of a tile.
pub const TILE_WORDS: usize = STRIP * TILE / 8;
/// Inputs must be a multiple of this.
const K_STEP: usize = 32;
/// Eight codes of zero.
const ZERO: u32 = 0x8888_8888;

/// Rows (strips) and words per row of a packed weight.
pub fn shape(n: usize, k: usize) -> Result<(usize, usize)> {
    if n == 0 || !n.is_multiple_of(STRIP) {
        return Err(Error::setting("outputs (N)", n, "a multiple of 16: keep this layer unpacked"));
    }
    if k == 0 || !k.is_multiple_of(K_STEP) {
        return Err(Error::setting("inputs (K)", k, "a multiple of 32: keep this layer unpacked"));
    }
    Ok((n / STRIP, dims::product("packed codes", k.div_ceil(TILE), TILE_WORDS)?))
}

/// Packs biased 4-bit codes (N, K) to `shape(n, k)` words.
pub fn pack(codes: &[u8], n: usize, k: usize, execution: &Execution<'_>) -> Result<Vec<u32>> {
    let (strips, words) = shape(n, k)?;
    dims::check_matrix("codes", codes, n, k)?;
    let mut out = zeros("packed codes", dims::product("packed codes", strips, words)?)?;
    out.fill(ZERO);
    execution.pool()?.install(|| {
        out.par_chunks_exact_mut(words).zip(codes.par_chunks_exact(STRIP * k)).enumerate().try_for_each(
            |(strip, (out, codes))| {
                check_codes(codes, k, 4, strip * STRIP).map(|()| pack_strip(codes, k, out))
            },
        )
    })?;
    Ok(out)
}

/// One strip. For 16 inputs of a row, bytes 0..8 and 8..16 become the two nibbles of eight bytes. The bytes of outputs
/// `c` and `c + 8`, taken in turns, are then four whole words.
fn pack_strip(codes: &[u8], k: usize, out: &mut [u32]) {
    for (tile, out) in out.chunks_exact_mut(TILE_WORDS).enumerate() {
        let steps = (k - tile * TILE).min(TILE) / 16;
        for step in 0..steps {
            for column in 0..8 {
                let at = |row: usize| row * k + tile * TILE + step * 16;
                let low = fold_row(&codes[at(column)..][..16]);
                let high = fold_row(&codes[at(column + 8)..][..16]);
                for (pair, word) in interleave(low, high).into_iter().enumerate() {
                    out[(4 * column + pair) * 4 + step] = word;
                }
            }
        }
    }
}

/// The inverse of [`pack`]; the padding of a short last tile must be zero.
pub fn unpack(packed: &[u32], n: usize, k: usize, execution: &Execution<'_>) -> Result<Vec<u8>> {
    let (strips, words) = shape(n, k)?;
    dims::check_matrix("packed codes", packed, strips, words)?;
    let mut out = zeros("codes", dims::product("codes", n, k)?)?;
    execution.pool()?.install(|| {
        out.par_chunks_exact_mut(STRIP * k)
            .zip(packed.par_chunks_exact(words))
            .try_for_each(|(codes, packed)| unpack_strip(packed, k, codes))
    })?;
    Ok(out)
}

fn unpack_strip(packed: &[u32], k: usize, codes: &mut [u8]) -> Result<()> {
    for (tile, packed) in packed.chunks_exact(TILE_WORDS).enumerate() {
        let steps = (k - tile * TILE).min(TILE) / 16;
        check_filling(packed, steps, k)?;
        for step in 0..steps {
            for column in 0..8 {
                let words = std::array::from_fn(|pair| packed[(4 * column + pair) * 4 + step]);
                for (half, folded) in separate(words).into_iter().enumerate() {
                    let at = (column + 8 * half) * k + tile * TILE + step * 16;
                    unfold_row(folded, &mut codes[at..][..16]);
                }
            }
        }
    }
    Ok(())
}

fn check_filling(tile: &[u32], steps: usize, k: usize) -> Result<()> {
    if tile.chunks_exact(4).all(|lane| lane[steps..].iter().all(|&word| word == ZERO)) {
        return Ok(());
    }
    Err(Error::setting("inputs (K)", k, "the width that was packed: the weight holds codes beyond it"))
}
