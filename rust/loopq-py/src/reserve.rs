//! Memory held back for small needs.
//!
//! The core reserves all memory that grows with a matrix through calls that return an error. Small allocations remain,
//! for threads, messages and lists. Their failure would end the process (`handle_alloc_error`). A piece of memory is
//! therefore kept from the beginning of a long call, or that is refused, and given up for the first small piece that is
//! not there.
#![allow(unsafe_code)] // an allocator

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use loopq_core::Error;

/// Untouched it takes address space only.
const BYTES: usize = 8 << 20;

/// Below this many bytes a request may use the reserve.
const SMALL: usize = 256 << 10;

const LAYOUT: Layout = Layout::new::<[u8; BYTES]>();

static RESERVE: AtomicPtr<u8> = AtomicPtr::new(null_mut());

#[global_allocator]
static ALLOCATOR: Reserving = Reserving;

struct Reserving;

/// Holds the reserve ready, or says that there is no memory for it.
pub(crate) fn fill() -> Result<(), Error> {
    if !RESERVE.load(Ordering::Acquire).is_null() {
        return Ok(());
    }
    // SAFETY: the layout is not of size zero.
    let made = unsafe { System.alloc(LAYOUT) };
    if made.is_null() {
        return Err(Error::OutOfMemory { what: "the work of a call", bytes: BYTES });
    }
    if RESERVE.compare_exchange(null_mut(), made, Ordering::AcqRel, Ordering::Relaxed).is_err() {
        // SAFETY: another thread was first, and nobody else has this one.
        unsafe { System.dealloc(made, LAYOUT) };
    }
    Ok(())
}

/// Gives the reserve up for a request that failed; whether there is any use in asking again.
fn give_up(size: usize) -> bool {
    if size >= SMALL {
        return false;
    }
    let held = RESERVE.swap(null_mut(), Ordering::AcqRel);
    if !held.is_null() {
        // SAFETY: it was made with this layout, and the exchange gave it to this thread alone.
        unsafe { System.dealloc(held, LAYOUT) };
    }
    !held.is_null()
}

// SAFETY: every request goes to the system's allocator unchanged, once or twice; the second only where the first gave
// nothing.
unsafe impl GlobalAlloc for Reserving {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promises.
        let found = unsafe { System.alloc(layout) };
        if found.is_null() && give_up(layout.size()) {
            // SAFETY: as above.
            return unsafe { System.alloc(layout) };
        }
        found
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promises.
        let found = unsafe { System.alloc_zeroed(layout) };
        if found.is_null() && give_up(layout.size()) {
            // SAFETY: as above.
            return unsafe { System.alloc_zeroed(layout) };
        }
        found
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as the caller promises.
        let found = unsafe { System.realloc(old, layout, size) };
        if found.is_null() && give_up(size) {
            // SAFETY: as above; a request that failed has left the old piece as it was.
            return unsafe { System.realloc(old, layout, size) };
        }
        found
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(old, layout) }
    }
}
