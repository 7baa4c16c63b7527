//! Tiles of the AMX extension: permission, configuration, and products of bf16 numbers.
//!
//! The compiler has no stable intrinsics for these instructions; they are written in assembly.
#![allow(unsafe_code)] // assembly; each block says what makes it sound

use std::arch::asm;
use std::marker::PhantomData;

/// The bit of CPUID leaf 7 for products of bytes.
pub const INT8: u32 = 1 << 25;
/// The bit for products of bf16 numbers.
pub const BF16: u32 = 1 << 22;

/// Columns, lines and depth in words of a tile of bf16 products.
const SIDE: usize = 16;
/// Words of a tile.
const WORDS: usize = SIDE * SIDE;
/// Entries from a line of sums to the next.
const LINE: usize = 48;

/// Whether this process may use tiles with those instructions: the processor has them, and Linux gives them on request.
#[must_use]
pub fn permitted(instructions: u32) -> bool {
    const TILES: u32 = 1 << 24;
    let edx = std::arch::x86_64::__cpuid_count(7, 0).edx;
    if edx & (TILES | instructions) != TILES | instructions {
        return false;
    }
    #[cfg(target_os = "linux")]
    {
        const ARCH_PRCTL: u64 = 158;
        const REQUEST_PERMISSION: u64 = 0x1023;
        const TILE_DATA: u64 = 18;
        let status: i64;
        // SAFETY: this system call takes two numbers, reads and writes no memory of ours, and changes only the set of
        // registers that the kernel saves.
        unsafe {
            asm!("syscall", inlateout("rax") ARCH_PRCTL => status, in("rdi") REQUEST_PERMISSION, in("rsi") TILE_DATA,
                 out("rcx") _, out("r11") _, options(nostack));
        }
        status == 0
    }
    #[cfg(not(target_os = "linux"))]
    false
}

/// All eight tiles with 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Config([u8; 64]);

const CONFIG: Config = {
    let mut bytes = [0; 64];
    bytes[0] = 1;
    let mut tile = 0;
    while tile < 8 {
        bytes[16 + 2 * tile] = 64;
        bytes[48 + tile] = 16;
        tile += 1;
    }
    Config(bytes)
};

/// The tiles of this thread, configured as long as this value lives; it cannot go to another thread.
pub struct Tiles(PhantomData<*mut ()>);

impl Tiles {
    /// Configures the tiles of this thread, of which it may hold one value at a time.
    ///
    /// # Safety
    /// [`permitted`] must have said yes.
    #[inline(always)]
    #[must_use]
    pub unsafe fn configure() -> Self {
        // SAFETY: the instruction reads 64 bytes, and exists by the caller's promise.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &CONFIG, options(nostack, preserves_flags, readonly));
        }
        Self(PhantomData)
    }
}

impl Drop for Tiles {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: there is a value of this type only where the instructions exist.
        unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
    }
}

/// Multiplies two runs of tiles `a` (16 columns by 16 words each) by two runs `b` (16 lines of words by 16 columns).
/// Sums run in the order that `docs/formats/hessian.md` defines. The sums of `a[i]` and `b[j]` go to `c` from
/// `at[i][j]` on, 16 lines that are [`LINE`] apart.
///
/// # Safety
/// [`permitted`] must have said yes for [`BF16`]: a [`Tiles`] may be one for bytes alone.
pub(super) unsafe fn products(_: &Tiles, a: [&[u32]; 2], b: [&[u32]; 2], c: &mut [f32], at: [[usize; 2]; 2]) {
    let steps = a[0].len() / WORDS;
    assert!(a.iter().chain(&b).all(|run| run.len() == steps * WORDS));
    let to = at.map(|row| row.map(|at| c[at..at + (SIDE - 1) * LINE + SIDE].as_mut_ptr()));
    // SAFETY: the caller promises that the instructions exist, and tiles are configured with 16 lines of 64 bytes.
    // Every step reads one tile of each run, inside the lengths checked above. Each store writes 16 lines of 64 bytes,
    // 192 apart, within a part of `c` that was cut out above.
    unsafe {
        asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack, nomem));
        for step in 0..steps {
            let next = |run: &[u32]| run.as_ptr().add(step * WORDS);
            asm!(
                "tileloadd tmm4, [{a0} + {line}]",
                "tileloadd tmm6, [{b0} + {line}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{b1} + {line}]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{a1} + {line}]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                a0 = in(reg) next(a[0]), a1 = in(reg) next(a[1]), b0 = in(reg) next(b[0]), b1 = in(reg) next(b[1]),
                line = in(reg) 4 * SIDE, options(nostack, readonly, preserves_flags),
            );
        }
        asm!(
            "tilestored [{c0} + {line}], tmm0",
            "tilestored [{c1} + {line}], tmm1",
            "tilestored [{c2} + {line}], tmm2",
            "tilestored [{c3} + {line}], tmm3",
            c0 = in(reg) to[0][0], c1 = in(reg) to[0][1], c2 = in(reg) to[1][0], c3 = in(reg) to[1][1],
            line = in(reg) 4 * LINE, options(nostack, preserves_flags),
        );
    }
}
