//! Dense bitstreams: code `j` of a row takes bits `j * b .. (j + 1) * b`, counted from the least significant bit of
//! the row's first 32-bit word. Rows start on word boundaries. Spec: `docs/formats/packing.md`.

use crate::{dims, Error, Result};

/// Words that a row of `dim` codes takes.
pub fn words(dim: usize, bits: u32) -> Result<usize> {
    Ok(dims::product("packed codes", dim, bits as usize)?.div_ceil(32))
}

fn check_bits(bits: u32) -> Result<()> {
    match bits {
        2 | 3 | 4 | 8 => Ok(()),
        other => Err(Error::setting("bits", other, "2, 3, 4, 8")),
    }
}

/// Packs biased codes (rows, dim), each below `2^bits`.
pub fn pack(codes: &[u8], rows: usize, dim: usize, bits: u32) -> Result<Vec<u32>> {
    check_bits(bits)?;
    dims::check_matrix("codes", codes, rows, dim)?;
    let top = ((1_u32 << bits) - 1) as u8;
    if let Some(at) = codes.iter().position(|&code| code > top) {
        let (row, column) = (at / dim, at % dim);
        return Err(Error::CodeRange { row, column, value: i64::from(codes[at]), bits, zero_offset: 0 });
    }
    let n_words = words(dim, bits)?;
    let mut out = vec![0; dims::product("packed codes", rows, n_words)?];
    if dim > 0 {
        for (row, line) in codes.chunks_exact(dim).zip(out.chunks_exact_mut(n_words)) {
            pack_row(row, bits, line);
        }
    }
    Ok(out)
}

fn pack_row(codes: &[u8], bits: u32, words: &mut [u32]) {
    // 32 codes fill exactly `bits` words, so words can be taken one chunk at a time.
    for (codes, words) in codes.chunks(32).zip(words.chunks_mut(bits as usize)) {
        let (mut buffer, mut filled, mut at) = (0_u64, 0, 0);
        for &code in codes {
            buffer |= u64::from(code) << filled;
            filled += bits;
            if filled >= 32 {
                words[at] = buffer as u32;
                buffer >>= 32;
                filled -= 32;
                at += 1;
            }
        }
        if filled > 0 {
            words[at] = buffer as u32;
        }
    }
}

/// The inverse of [`pack`].
pub fn unpack(packed: &[u32], rows: usize, dim: usize, bits: u32) -> Result<Vec<u8>> {
    check_bits(bits)?;
    let n_words = words(dim, bits)?;
    dims::check_matrix("packed codes", packed, rows, n_words)?;
    let mut out = vec![0; dims::product("codes", rows, dim)?];
    if dim > 0 {
        for (row, line) in out.chunks_exact_mut(dim).zip(packed.chunks_exact(n_words)) {
            for (codes, words) in row.chunks_mut(32).zip(line.chunks(bits as usize)) {
                unpack_chunk(words, bits, codes);
            }
        }
    }
    Ok(out)
}

fn unpack_chunk(words: &[u32], bits: u32, codes: &mut [u8]) {
    let mask = (1_u64 << bits) - 1;
    let (mut buffer, mut filled, mut at) = (0_u64, 0, 0);
    for code in codes {
        if filled < bits {
            buffer |= u64::from(words[at]) << filled;
            filled += 32;
            at += 1;
        }
        *code = (buffer & mask) as u8;
        buffer >>= bits;
        filled -= bits;
    }
}
