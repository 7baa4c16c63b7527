//! The tile in plain Rust: fallback, and reference for the other instruction sets.
//!
//! Nothing here is inlined into the tile, which unrolls its loops: the sixty-four products of a call outweigh it.
#![allow(unsafe_code)] // the trait's methods take pointers

use std::array::from_fn;

use half::{bf16, f16};

use super::layout::{ScaleFormat, LANES, LINE};
use super::tile::Lanes;
use super::windows::{half_of, Windows};
use loopq_core::grid::mix;

pub(super) struct Portable;

// Every block below reads or writes only the bytes that the trait's contract names.
impl Lanes for Portable {
    type Codes = [u8; LINE];
    type Ints = [i32; LANES];
    type Floats = [f32; LANES];

    const WAITS: bool = false;
    const RAISED: u8 = 0;

    #[inline(never)]
    unsafe fn line(at: *const u8) -> [u8; LINE] {
        // SAFETY: a line of bytes.
        unsafe { at.cast::<[u8; LINE]>().read() }
    }

    #[inline(never)]
    unsafe fn bits(c: [u8; LINE], by: u32, mask: u8) -> [u8; LINE] {
        c.map(|c| c >> by & mask)
    }

    #[inline(never)]
    unsafe fn or(a: [u8; LINE], b: [u8; LINE]) -> [u8; LINE] {
        from_fn(|i| a[i] | b[i])
    }

    #[inline(never)]
    unsafe fn dot<const WIDE: bool>(sum: [i32; LANES], c: [u8; LINE], x: *const i8) -> [i32; LANES] {
        // SAFETY: four bytes.
        let x = unsafe { x.cast::<[i8; 4]>().read() };
        from_fn(|lane| {
            let products = (0..4).map(|i| i32::from(c[lane * 4 + i]) * i32::from(x[i]));
            sum[lane] + products.sum::<i32>()
        })
    }

    #[inline(never)]
    unsafe fn look_up(c: [u8; LINE], levels: &[i8; 16]) -> [u8; LINE] {
        c.map(|c| levels[usize::from(c) % 16] as u8)
    }

    #[inline(never)]
    unsafe fn dot_levels(sum: [i32; LANES], c: [u8; LINE], x: *const i8) -> [i32; LANES] {
        // SAFETY: four bytes.
        let x = unsafe { x.cast::<[i8; 4]>().read() };
        from_fn(|lane| {
            let products = (0..4).map(|i| i32::from(c[lane * 4 + i] as i8) * i32::from(x[i]));
            sum[lane] + products.sum::<i32>()
        })
    }

    unsafe fn splat(value: i32) -> [i32; LANES] {
        [value; LANES]
    }

    #[inline(never)]
    unsafe fn times(bytes: *const u8, value: i32) -> [i32; LANES] {
        // SAFETY: sixteen bytes.
        unsafe { bytes.cast::<[u8; LANES]>().read() }.map(|b| i32::from(b) * value)
    }

    #[inline(never)]
    unsafe fn add(a: [i32; LANES], b: [i32; LANES]) -> [i32; LANES] {
        from_fn(|i| a[i] + b[i])
    }

    #[inline(never)]
    unsafe fn float(sums: [i32; LANES]) -> [f32; LANES] {
        sums.map(|s| s as f32)
    }

    unsafe fn splat_float(value: f32) -> [f32; LANES] {
        [value; LANES]
    }

    #[inline(never)]
    unsafe fn scales(at: *const u8, format: ScaleFormat) -> [f32; LANES] {
        // SAFETY: sixteen scales of that format, at any alignment.
        unsafe {
            match format {
                ScaleFormat::F32 => at.cast::<[f32; LANES]>().read_unaligned(),
                ScaleFormat::Bf16 => {
                    at.cast::<[u16; LANES]>().read_unaligned().map(|b| bf16::from_bits(b).to_f32())
                }
                ScaleFormat::F16 => {
                    at.cast::<[u16; LANES]>().read_unaligned().map(|b| f16::from_bits(b).to_f32())
                }
            }
        }
    }

    #[inline(never)]
    unsafe fn mul(a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        from_fn(|i| a[i] * b[i])
    }

    #[inline(never)]
    unsafe fn fma(a: [f32; LANES], b: [f32; LANES], c: [f32; LANES]) -> [f32; LANES] {
        from_fn(|i| a[i].mul_add(b[i], c[i]))
    }

    unsafe fn minus(c: [u8; LINE], by: u8) -> [u8; LINE] {
        c.map(|c| c.wrapping_sub(by))
    }

    unsafe fn store_codes(to: *mut u8, c: [u8; LINE]) {
        // SAFETY: room for a line.
        unsafe { to.cast::<[u8; LINE]>().write(c) };
    }

    unsafe fn load_ints(at: *const i32) -> [i32; LANES] {
        // SAFETY: sixteen numbers.
        unsafe { at.cast::<[i32; LANES]>().read_unaligned() }
    }

    unsafe fn load(at: *const f32) -> [f32; LANES] {
        // SAFETY: sixteen numbers.
        unsafe { at.cast::<[f32; LANES]>().read_unaligned() }
    }

    unsafe fn store(to: *mut f32, values: [f32; LANES]) {
        // SAFETY: room for sixteen numbers.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(values) };
    }

    #[inline(never)]
    unsafe fn pair<const BITS: u32>(at: *const u8, next: *const u8, windows: &Windows) -> [[u8; LINE]; 2] {
        // SAFETY: sixteen bytes of each half of the rows.
        let sum = |at: *const u8, lane: usize| {
            let bytes = unsafe { at.cast::<[u8; 16]>().read() };
            let found = from_fn(|i| bytes[usize::from(windows.bytes[4 * lane + i])]);
            let state = u32::from_le_bytes(found) >> windows.shifts[lane] & windows.mask;
            mix(state).to_le_bytes().into_iter().map(u16::from).sum::<u16>().to_le_bytes()
        };
        [half_of(BITS), 0].map(|half| {
            let sums: [[[u8; 2]; 2]; LANES] =
                from_fn(|lane| [at, next].map(|at| sum(at.wrapping_add(half), lane)));
            from_fn(|i| sums[i / 4][i % 4 / 2][i % 2])
        })
    }

    #[inline(never)]
    unsafe fn dot_pair(sum: [i32; LANES], pair: [u8; LINE], x: *const i16) -> [i32; LANES] {
        // SAFETY: two numbers.
        let x = unsafe { x.cast::<[i16; 2]>().read() };
        from_fn(|lane| {
            let value =
                |i: usize| i32::from(i16::from_le_bytes([pair[4 * lane + i], pair[4 * lane + i + 1]]));
            sum[lane].wrapping_add(value(0) * i32::from(x[0])).wrapping_add(value(2) * i32::from(x[1]))
        })
    }

    unsafe fn prefetch(_: *const u8) {}
}
