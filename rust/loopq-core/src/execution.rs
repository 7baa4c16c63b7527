//! How work is carried out: on how many threads, and who may stop it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::process::PerProcess;
use crate::{Error, Result};

/// The largest number of threads that may be asked for.
pub const MAX_THREADS: usize = 1024;

/// Pools by their number of threads, made at first use and kept: a layer is many short calls. A forked child makes its own.
static POOLS: PerProcess<Mutex<HashMap<usize, Arc<ThreadPool>>>> = PerProcess::unmade();

/// A flag by which one thread stops the work of others.
#[derive(Debug, Default)]
pub struct Cancel {
    cancelled: AtomicBool,
}

impl Cancel {
    /// A flag that is not set.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Asks the work to stop at its next check.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// [`Error::Interrupted`] after [`Cancel::cancel`].
    pub fn check(&self) -> Result<()> {
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        Ok(())
    }
}

/// Threads and cancelling of one call; nothing here changes a bit of its result.
#[derive(Clone, Copy, Debug)]
pub struct Execution<'a> {
    /// Threads; 0 for as many as the machine gives this process.
    pub threads: usize,
    /// Checked many times a second.
    pub cancel: &'a Cancel,
}

impl Execution<'_> {
    /// [`Error::Interrupted`] once the work is cancelled.
    pub fn check(&self) -> Result<()> {
        self.cancel.check()
    }

    /// The pool of that many threads.
    pub fn pool(&self) -> Result<Arc<ThreadPool>> {
        pool(self.threads)
    }
}

/// How many threads a setting means: 0 is as many as the machine gives this process.
#[must_use]
pub fn number(threads: usize) -> usize {
    match threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        threads => threads,
    }
}

/// A pool of exactly `threads` threads, or of all for 0.
pub fn pool(threads: usize) -> Result<Arc<ThreadPool>> {
    if threads > MAX_THREADS {
        return Err(Error::setting("threads", threads, format!("0 (all) to {MAX_THREADS}")));
    }
    let n = number(threads);
    let mut pools = POOLS.get().lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(found) = pools.get(&n) {
        return Ok(Arc::clone(found));
    }
    let made = ThreadPoolBuilder::new()
        .num_threads(n)
        .thread_name(|i| format!("loopq-{i}"))
        .build()
        .map_err(|e| Error::Threads { threads: n, reason: e.to_string() })?;
    let made = Arc::new(made);
    pools.insert(n, Arc::clone(&made));
    Ok(made)
}
