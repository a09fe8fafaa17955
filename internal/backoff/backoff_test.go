package backoff

import (
	"context"
	"errors"
	"testing"
	"time"
)

func TestAPauseDoublesUpToTheLimit(t *testing.T) {
	b := BackOff{Wait: time.Second, Max: 5 * time.Second}
	for _, want := range []time.Duration{1, 2, 4, 5, 5} {
		want *= time.Second
		if got := b.Next(); got < want || got >= want+want/4 {
			t.Errorf("got %s, want %s and less than a quarter more", got, want)
		}
	}
}

func TestSleepEndsWithTheContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Sleep(ctx, time.Hour); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	if err := Sleep(t.Context(), 0); err != nil {
		t.Errorf("error %v", err)
	}
}
