//! Threads that run one function together and meet at barriers.
//!
//! A token passes through hundreds of products of some tens of microseconds. Waking a thread for each would take as
//! long as its part of the work; so threads are woken once a call, and wait for each other in a loop.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use loopq_core::execution::{number, pool, Cancel, Execution};
use loopq_core::process::PerProcess;
use loopq_core::{Error, Result};

/// Looks at the barrier before a waiting thread lets others have its processor: some tens of microseconds.
const SPINS: u32 = 1 << 13;

/// One team at a time: two that wait for each other's threads would wait for ever.
static ONE: PerProcess<Mutex<()>> = PerProcess::unmade();

/// A barrier, and who of the team a thread is.
#[derive(Debug)]
pub(super) struct Member<'a> {
    team: &'a Team<'a>,
    index: usize,
}

#[derive(Debug)]
struct Team<'a> {
    of: usize,
    cancel: &'a Cancel,
    arrived: AtomicUsize,
    round: AtomicUsize,
    broken: AtomicBool,
}

impl Member<'_> {
    /// Waits until all have come here: what any of them did before, all see after. An error when the call is cancelled, or one of them will not come.
    pub(super) fn meet(&self) -> Result<()> {
        let team = self.team;
        team.cancel.check()?;
        let round = team.round.load(Ordering::Acquire);
        if team.arrived.fetch_add(1, Ordering::AcqRel) + 1 == team.of {
            team.arrived.store(0, Ordering::Relaxed);
            team.round.store(round.wrapping_add(1), Ordering::Release);
            return Ok(());
        }
        let mut looked = 0;
        while team.round.load(Ordering::Acquire) == round {
            if team.broken.load(Ordering::Relaxed) {
                return Err(Error::Interrupted);
            }
            looked += 1;
            if looked < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    /// This member's part of `0..n`, which overlaps no other's. It is the same at every call, so its data stay in the
    /// processor's cache.
    pub(super) fn part(&self, n: usize) -> std::ops::Range<usize> {
        let of = self.team.of;
        n * self.index / of..n * (self.index + 1) / of
    }
}

impl Drop for Member<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.team.broken.store(true, Ordering::Relaxed);
        }
    }
}

/// Runs `work` on all threads of an execution at once, the caller's among them.
///
/// Returns the first error. An error in `work` returns at once, and members that wait for it return too.
pub(super) fn together(
    execution: &Execution<'_>,
    work: impl Fn(&Member<'_>) -> Result<()> + Sync,
) -> Result<()> {
    let of = number(execution.threads);
    let team = Team {
        of,
        cancel: execution.cancel,
        arrived: AtomicUsize::new(0),
        round: AtomicUsize::new(0),
        broken: AtomicBool::new(false),
    };
    let failed = Mutex::new(None);
    let run = |index: usize| {
        if let Err(error) = work(&Member { team: &team, index }) {
            // The flag is set after the error, so waiting members always find the cause.
            failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            team.broken.store(true, Ordering::Relaxed);
        }
    };
    if of == 1 {
        run(0);
    } else {
        let pool = pool(of - 1)?;
        let _one = ONE.get().lock().unwrap_or_else(PoisonError::into_inner);
        pool.in_place_scope(|scope| {
            scope.spawn_broadcast(|_, thread| run(thread.index() + 1));
            run(0);
        });
    }
    failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, unsafe_code)]
mod tests {
    use super::together;
    use crate::disjoint::Disjoint;
    use loopq_core::execution::{Cancel, Execution};
    use loopq_core::Error;

    #[test]
    fn what_one_thread_writes_all_read_after_a_meeting() {
        for threads in [1, 2, 5] {
            let mut numbers = vec![0.0; 40];
            let board = Disjoint::over(&mut numbers);
            let cancel = Cancel::new();
            together(&Execution { threads, cancel: &cancel }, |member| {
                for round in 0..200 {
                    let part = member.part(40);
                    // SAFETY: parts do not overlap, and all have met since anyone read.
                    unsafe { board.write(part.start, &vec![round as f32; part.len()]) };
                    member.meet()?;
                    // SAFETY: all have met since anyone wrote, and meet again before.
                    assert!(unsafe { board.read(0..40) }.iter().all(|&v| v == round as f32));
                    member.meet()?;
                }
                Ok(())
            })
            .unwrap();
        }
    }

    #[test]
    fn an_error_of_one_ends_all_and_is_the_one_returned() {
        let error = Error::setting("threads", 3, "none");
        let cancel = Cancel::new();
        let found = together(&Execution { threads: 3, cancel: &cancel }, |member| {
            if member.index == 0 {
                return Err(error.clone());
            }
            member.meet()
        });
        assert_eq!(found.unwrap_err(), error);
    }

    #[test]
    fn a_cancelled_call_ends_at_the_next_meeting() {
        for threads in [1, 3] {
            let cancel = Cancel::new();
            let found = together(&Execution { threads, cancel: &cancel }, |member| {
                for round in 0.. {
                    if member.index == 0 && round == 40 {
                        cancel.cancel();
                    }
                    member.meet()?;
                }
                Ok(())
            });
            assert_eq!(found.unwrap_err(), Error::Interrupted);
        }
    }
}
