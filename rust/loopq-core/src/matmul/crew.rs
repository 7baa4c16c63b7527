//! Threads that stay awake between the products of a loop.
//!
//! A product of one token takes tens of microseconds, about what it takes to wake a sleeping thread. So the threads of a
//! [`Crew`] look out for the next call for a while before they sleep, and the caller looks out for their end. A pool of
//! rayon sleeps on both sides.

use std::any::Any;
use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use crate::execution::MAX_THREADS;
use crate::{Error, Result};

/// How long a thread looks out for the next call. Between two products of a loop lie a norm, attention or an activation.
const AWAKE: Duration = Duration::from_micros(500);
/// Looks at a flag between two offers of the core to whoever else wants to run.
const LOOKS: u32 = 64;

/// Crews by their number of helpers, made at first use and kept.
static CREWS: Mutex<Option<HashMap<usize, Arc<Crew>>>> = Mutex::new(None);

/// Work of one call: part `i` is for thread `i`.
type Work<'a> = &'a (dyn Fn(usize) + Sync);

/// Helpers of the calling thread.
pub(super) struct Crew {
    shared: Arc<Shared>,
    helpers: Vec<Thread>,
    /// Held during a call.
    call: Mutex<()>,
}

struct Shared {
    /// Calls so far.
    calls: AtomicUsize,
    /// Work of the last call. Written by the caller while no helper is at work, read by helpers after they saw `calls` grow.
    work: UnsafeCell<Option<Work<'static>>>,
    /// Helpers that have not finished the last call.
    left: AtomicUsize,
    /// What a helper panicked with.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// By helper: it sleeps, or is about to.
    asleep: Vec<AtomicBool>,
}

#[allow(unsafe_code)] // a slot that one thread writes and others read in turns, which no safe type says without a lock
                      // SAFETY: the other fields are atomic. `work` is written in `Crew::run` under `call` while `left` is 0, when no helper reads it;
                      // helpers read it between `calls` growing and their decrement of `left`, both of which order the accesses.
unsafe impl Sync for Shared {}

impl Crew {
    /// The crew of that many helpers.
    pub(super) fn of(helpers: usize) -> Result<Arc<Self>> {
        if helpers > MAX_THREADS {
            return Err(Error::setting("threads", helpers + 1, format!("0 (all) to {MAX_THREADS}")));
        }
        let mut crews = CREWS.lock().unwrap_or_else(PoisonError::into_inner);
        let crews = crews.get_or_insert_with(HashMap::new);
        if let Some(found) = crews.get(&helpers) {
            return Ok(Arc::clone(found));
        }
        let made = Arc::new(Self::hire(helpers)?);
        crews.insert(helpers, Arc::clone(&made));
        Ok(made)
    }

    fn hire(n: usize) -> Result<Self> {
        let shared = Arc::new(Shared {
            calls: AtomicUsize::new(0),
            work: UnsafeCell::new(None),
            left: AtomicUsize::new(0),
            panic: Mutex::new(None),
            asleep: (0..n).map(|_| AtomicBool::new(false)).collect(),
        });
        let mut helpers = Vec::with_capacity(n);
        for i in 0..n {
            let shared = Arc::clone(&shared);
            let spawned = thread::Builder::new()
                .name(format!("loopq-product-{i}"))
                .spawn(move || shared.help(i))
                .map_err(|e| Error::Threads { threads: n, reason: e.to_string() })?;
            helpers.push(spawned.thread().clone());
        }
        Ok(Self { shared, helpers, call: Mutex::new(()) })
    }

    /// Does `work(0)` here and `work(1)`, `work(2)`, ... each on a helper of its own. Where another thread has the helpers, all of
    /// it is done here.
    pub(super) fn run(&self, work: Work<'_>) {
        let _held = match self.call.try_lock() {
            Ok(held) => held,
            // A panic of an earlier caller's part: its helpers were through before it left.
            Err(TryLockError::Poisoned(held)) => held.into_inner(),
            Err(TryLockError::WouldBlock) => return (0..=self.helpers.len()).for_each(work),
        };
        let shared = &*self.shared;
        shared.post(work, &self.helpers);
        // Helpers use what the caller owns: it stays until they are through, even if its own part panics.
        let end = End(shared);
        work(0);
        drop(end);
        if let Some(panic) = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take() {
            resume_unwind(panic);
        }
    }
}

impl Shared {
    #[allow(unsafe_code)] // see below
    fn post(&self, work: Work<'_>, helpers: &[Thread]) {
        // SAFETY: the lifetime is only longer in name. `End` keeps the caller in `Crew::run` until `left` is 0, and no helper
        // touches the work after its decrement.
        let work: Work<'static> = unsafe { std::mem::transmute(work) };
        // SAFETY: `call` is held and `left` is 0: every helper is through with the call before, see `Sync`.
        unsafe { *self.work.get() = Some(work) };
        self.left.store(helpers.len(), Ordering::Relaxed);
        // One order for `calls` and `asleep`: either the helper sees this call before it sleeps, or is seen asleep here.
        self.calls.fetch_add(1, Ordering::SeqCst);
        for (helper, asleep) in helpers.iter().zip(&self.asleep) {
            if asleep.load(Ordering::SeqCst) {
                helper.unpark();
            }
        }
    }

    /// What a helper does as long as the process lives.
    #[allow(unsafe_code)] // see below
    fn help(&self, i: usize) {
        let mut seen = 0;
        loop {
            seen = self.next(seen, &self.asleep[i]);
            // SAFETY: `next` saw the call that the work was written for, and `left` counts this helper: see `Sync`.
            let work = unsafe { *self.work.get() };
            if let Some(work) = work {
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| work(i + 1))) {
                    *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
                }
            }
            self.left.fetch_sub(1, Ordering::Release);
        }
    }

    /// Waits for a call after `seen`; returns its number.
    fn next(&self, seen: usize, asleep: &AtomicBool) -> usize {
        let began = Instant::now();
        while began.elapsed() < AWAKE {
            if look(|| self.calls.load(Ordering::Acquire) != seen) {
                return self.calls.load(Ordering::Acquire);
            }
        }
        asleep.store(true, Ordering::SeqCst);
        while self.calls.load(Ordering::SeqCst) == seen {
            thread::park();
        }
        asleep.store(false, Ordering::SeqCst);
        self.calls.load(Ordering::Acquire)
    }
}

/// Waits for all helpers when it is dropped.
struct End<'a>(&'a Shared);

impl Drop for End<'_> {
    fn drop(&mut self) {
        while !look(|| self.0.left.load(Ordering::Acquire) == 0) {}
    }
}

/// Whether a condition came to hold within a few looks; if not, the core was offered to others.
fn look(holds: impl Fn() -> bool) -> bool {
    for _ in 0..LOOKS {
        if holds() {
            return true;
        }
        std::hint::spin_loop();
    }
    thread::yield_now();
    holds()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn each_part_is_done_once_by_whichever_call() {
        for helpers in [1, 2, 5] {
            let crew = Crew::of(helpers).unwrap();
            for call in 0..200 {
                let done: Vec<_> = (0..=helpers).map(|_| AtomicUsize::new(0)).collect();
                crew.run(&|i| {
                    done[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(done.iter().all(|d| d.load(Ordering::Relaxed) == 1), "call {call}");
                if call % 50 == 0 {
                    thread::sleep(AWAKE * 3); // so that helpers sleep
                }
            }
        }
    }

    #[test]
    fn callers_at_the_same_time_all_get_their_work_done() {
        let total = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let crew = Crew::of(3).unwrap();
                    for _ in 0..300 {
                        crew.run(&|i| {
                            total.fetch_add(i + 1, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(total.into_inner(), 4 * 300 * (1 + 2 + 3 + 4));
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_crew_goes_on() {
        let crew = Crew::of(2).unwrap();
        for bad in 0..3 {
            let caught = catch_unwind(AssertUnwindSafe(|| crew.run(&|i| assert!(i != bad, "planted"))));
            assert!(caught.is_err(), "part {bad}");
        }
        let done = AtomicUsize::new(0);
        crew.run(&|_| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.into_inner(), 3);
    }

    #[test]
    fn too_many_threads_are_refused() {
        assert!(Crew::of(MAX_THREADS + 1).is_err());
    }
}
