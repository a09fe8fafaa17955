// Command hello is what the images of the rig run: it says whose image it is in
// and waits for its end. As the sandbox image's program it just waits.
package main

import (
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGINT, syscall.SIGTERM)
	if name, err := os.ReadFile("/kernel-name"); err == nil {
		fmt.Printf("hello from %s\n", name)
	}
	<-end
}
