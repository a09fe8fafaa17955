package puller

import (
	"context"
	"sync"
)

// keyedMutex is a lock per key. It keeps two pulls from fetching one blob or
// unpacking one layer at the same time; the client's unpacker locks by the names
// of both. (Containerd has such a lock, in an internal package.)
type keyedMutex struct {
	mu    sync.Mutex
	locks map[string]*keyLock
}

type keyLock struct {
	held  chan struct{} // has room for one
	users int           // holder and waiters, guarded by keyedMutex.mu
}

// Lock waits for the key. It fails only when the context ends.
func (m *keyedMutex) Lock(ctx context.Context, key string) error {
	m.mu.Lock()
	if m.locks == nil {
		m.locks = map[string]*keyLock{}
	}
	l := m.locks[key]
	if l == nil {
		l = &keyLock{held: make(chan struct{}, 1)}
		m.locks[key] = l
	}
	l.users++
	m.mu.Unlock()
	select {
	case l.held <- struct{}{}:
		return nil
	case <-ctx.Done():
		m.leave(key)
		return context.Cause(ctx)
	}
}

// Unlock gives the key to the next one that waits. The caller holds it.
func (m *keyedMutex) Unlock(key string) {
	m.mu.Lock()
	l := m.locks[key]
	m.mu.Unlock()
	<-l.held
	m.leave(key)
}

func (m *keyedMutex) leave(key string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	l := m.locks[key]
	if l.users--; l.users == 0 {
		delete(m.locks, key)
	}
}
